// How much of a long conversation fits before the next answer. Characters are counted, at the tokens
// that a character of the last prompt took: the server's own count comes with each answer.

const MARGIN = 1.1;
const AROUND = 12; // characters' worth of tokens around each message

export class Memory {
  constructor(contextTokens) {
    this.contextTokens = contextTokens;
    this.density = 0.5; // tokens a character, until an answer tells
  }

  learn(messages, promptTokens) {
    this.density = promptTokens / charactersOf(messages);
  }

  // The newest messages that fit beside an answer; a system prompt stays, and so does the question.
  fitting(messages, answerTokens) {
    const room = (this.contextTokens - answerTokens) / (this.density * MARGIN);
    const system = messages.filter((message) => message.role === "system");
    let rest = messages.filter((message) => message.role !== "system");
    while (rest.length > 2 && charactersOf([...system, ...rest]) > room) rest = rest.slice(2);
    return [...system, ...rest];
  }
}

const charactersOf = (messages) =>
  messages.reduce((sum, message) => sum + message.content.length + AROUND, 0);
