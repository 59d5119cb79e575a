// What users of OpenAI's client for JavaScript rely on, against the server of the arguments.
// Each check is an assertion; the last line is printed when all held.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, busyUrl, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const model = "smollm2";
const messages = [{ role: "user", content: "What is the capital of France?" }];
const asks = { model, messages, temperature: 0, max_tokens: 40 };
const weather = [{ role: "user", content: "What is the weather in Paris?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", description: "a city" } },
  required: ["city"],
};
const description = "Tells the weather";

async function chats() {
  const { data, request_id } = await client.chat.completions.create(asks).withResponse();
  const text = data.choices[0].message.content;
  assert.match(text, /Paris/);
  assert.ok(request_id);
  let streamed = "";
  let usage = null;
  const stream = await client.chat.completions.create({
    ...asks,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(streamed, text);
  assert.equal(usage.completion_tokens, data.usage.completion_tokens);
}

async function leaves() {
  const stream = await client.chat.completions.create({ ...asks, max_tokens: 400, stream: true });
  for await (const chunk of stream) {
    assert.equal(chunk.object, "chat.completion.chunk");
    break;
  }
  assert.ok(stream.controller.signal.aborted);
}

async function tools() {
  const offered = [{ type: "function", function: { name: "get_weather", description, parameters } }];
  for (const choice of ["required", "auto"]) {
    const body = { ...asks, messages: weather, tools: offered, tool_choice: choice };
    const whole = (await client.chat.completions.create(body)).choices[0];
    const streamed = await client.chat.completions.stream(body).finalChatCompletion();
    assert.equal(streamed.choices[0].finish_reason, whole.finish_reason);
    const called = (each) => (each.message.tool_calls ?? []).map((call) => call.function.arguments);
    assert.deepEqual(called(streamed.choices[0]), called(whole));
    if (choice === "required") {
      assert.equal(JSON.parse(called(whole)[0]).city, "Paris");
    }
  }
}

async function runner() {
  const asked = [];
  const run = client.chat.completions.runTools({
    ...asks,
    messages: weather,
    tool_choice: { type: "function", function: { name: "get_weather" } },
    tools: [
      {
        type: "function",
        function: {
          name: "get_weather",
          description,
          parameters,
          parse: JSON.parse,
          function: ({ city }) => {
            asked.push(city);
            return `Sunny in ${city}`;
          },
        },
      },
    ],
  });
  await run.done();
  assert.deepEqual(asked, ["Paris"]);
  assert.equal(run.messages.at(-1).role, "tool");
}

async function structured() {
  const city = z.object({ name: z.string(), country: z.string() });
  const parsed = await client.chat.completions.parse({
    ...asks,
    response_format: zodResponseFormat(city, "city"),
  });
  assert.equal(parsed.choices[0].message.parsed.country, "France");
}

async function responses() {
  const body = { model, input: messages, temperature: 0, max_output_tokens: 40 };
  const whole = await client.responses.create(body);
  assert.match(whole.output_text, /Paris/);
  const stream = client.responses.stream(body);
  let text = "";
  for await (const event of stream) {
    text += event.type === "response.output_text.delta" ? event.delta : "";
  }
  const final = await stream.finalResponse();
  assert.equal(text, whole.output_text);
  assert.equal(final.output_text, whole.output_text);
  assert.deepEqual(final.usage.output_tokens, whole.usage.output_tokens);
}

async function others() {
  const models = [];
  for await (const each of client.models.list()) {
    models.push(each.id);
  }
  assert.deepEqual(models, [model]);
  const completion = await client.completions.create({
    model,
    prompt: "The capital of France is",
    max_tokens: 5,
    temperature: 0,
    logprobs: 1,
  });
  assert.match(completion.choices[0].text, /^ Paris/);
  assert.equal(completion.choices[0].logprobs.tokens.length, 5);
  const file = await client.files.create({
    file: await OpenAI.toFile(Buffer.from("{}\n"), "lines.jsonl"),
    purpose: "batch",
  });
  assert.equal(await (await client.files.content(file.id)).text(), "{}\n");
  assert.ok((await client.files.delete(file.id)).deleted);
}

async function errors() {
  const rejects = (promise, kind, code) =>
    assert.rejects(promise, (error) => error instanceof kind && (!code || error.code === code));
  const wrong = new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 });
  const busy = new OpenAI({ baseURL: `${busyUrl}/v1`, apiKey, maxRetries: 0 });
  const long = [{ role: "user", content: "word ".repeat(9000) }];
  await rejects(wrong.models.list(), OpenAI.AuthenticationError, "invalid_api_key");
  await rejects(
    client.chat.completions.create({ ...asks, model: "other" }),
    OpenAI.NotFoundError,
    "model_not_found",
  );
  await rejects(client.chat.completions.create({ ...asks, temperature: 9 }), OpenAI.BadRequestError);
  await rejects(
    client.chat.completions.create({ ...asks, messages: long }),
    OpenAI.BadRequestError,
    "context_length_exceeded",
  );
  await rejects(
    busy.chat.completions.create({ ...asks, model: "demo" }),
    OpenAI.RateLimitError,
    "overloaded",
  );
}

for (const check of [chats, leaves, tools, runner, structured, responses, others, errors]) {
  await check();
}
console.log("all held");
