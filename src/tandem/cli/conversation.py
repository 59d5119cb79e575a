"""A conversation in the terminal: turns, commands, and feedback about the last answer.

Knows what may be said about an answer, not how it travels (`chat`) or is typed (`terminal`).
Invariant: what a model writes is shown as plain text, and a turn that failed leaves the
conversation as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from tandem.cli.chat import BASE, ChatError, ChatServer
from tandem.cli.prospects import begins
from tandem.cli.terminal import Terminal

HELP = """\
/good, /bad       the last answer is good, or bad; after /retry: better or worse than the one before
/edit [TEXT]      write the answer that you wanted (in $EDITOR, or TEXT)
/retry            another answer to the same question; then /good or /bad compares the two
/adapter NAME     the adapter that learns from your feedback, and that you talk to once it is there
/system TEXT      set the system prompt and forget the conversation
/reset            forget the conversation
/help, /exit      Ctrl-C stops an answer"""
_HINT = "/good, /bad, /edit and /retry teach; /help says more; /exit leaves"

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered to which messages. `completion_id` is empty if it was stopped, or if it is
    the user's own text; `ended` says that it is whole."""

    messages: tuple[Message, ...]
    text: str
    completion_id: str = ""
    version: str = ""
    ended: bool = True


class Conversation:
    """Messages so far, with the last answer and, after a retry, the one before."""

    def __init__(self, server: ChatServer, terminal: Terminal, system: str, adapter: str) -> None:
        self._server = server
        self._terminal = terminal
        self._console = terminal.console
        self._system = system
        self._adapter = adapter
        self._messages: list[Message] = []
        self._last: Answer | None = None
        self._before: Answer | None = None
        self._reset()

    def run(self) -> int:
        """Read turns until the user leaves; the exit code. A failed turn ends a piped conversation
        with code 1."""
        try:
            model = self._server.learn_as(self._adapter) if self._adapter else self._server.model()
        except ChatError as error:
            self._fail(error)
            return 1
        learns = f"; feedback teaches {self._adapter}" if self._adapter else ""
        self._say(f"talking to {model}{learns}; {_HINT}")
        while True:
            try:
                turn = self._terminal.read("> ").strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return 0
            if turn == "/exit":
                return 0
            try:
                self._take(turn)
            except ChatError as error:
                self._fail(error)
                if not self._terminal.interactive:
                    return 1

    def _take(self, turn: str) -> None:
        command, _, rest = turn.partition(" ")
        rest = rest.strip()
        match command:
            case "/good":
                self._rate(good=True)
            case "/bad":
                self._rate(good=False)
            case "/edit":
                self._edit(rest)
            case "/retry":
                self._retry()
            case "/adapter" if rest:
                model = self._server.learn_as(rest)
                self._adapter = rest
                self._say(f"feedback teaches {rest}; talking to {model}")
            case "/reset":
                self._reset()
            case "/system":
                self._system = rest
                self._reset()
            case _ if command.startswith("/"):
                self._say(HELP)
            case _ if turn:
                self._ask([*self._messages, {"role": "user", "content": turn}])

    # ------------------------------------------------------------------ answers

    def _reset(self) -> None:
        self._messages = [{"role": "system", "content": self._system}] if self._system else []
        self._last = self._before = None

    def _ask(self, messages: list[Message]) -> bool:
        """Show an answer to these messages and keep both; whether there was one. Raises
        `ChatError`."""
        answer = self._stream(messages)
        if answer is None:
            return False
        self._before = None
        self._keep(answer)
        return True

    def _keep(self, answer: Answer) -> None:
        self._last = answer
        said = {"role": "assistant", "content": answer.text}
        self._messages = [*answer.messages, said]

    def _stream(self, messages: list[Message]) -> Answer | None:
        """Show the pieces of an answer; None if it is stopped or empty. Raises `ChatError`."""
        text, completion_id = "", ""
        try:
            for piece in self._server.answer(messages):
                text += piece
                shown = "".join(c for c in piece if c.isprintable() or c in "\n\t")
                self._console.print(shown, end="", markup=False, highlight=False, soft_wrap=True)
            completion_id = self._server.completion_id
        except KeyboardInterrupt:
            self._console.print(" [stopped]", end="", markup=False)
        version = self._server.version
        told = f"  [{version}]" if text and version else ""
        self._console.print(told, style="dim", markup=False, highlight=False)
        ended = self._server.ended
        return Answer(tuple(messages), text, completion_id, version, ended) if text else None

    def _retry(self) -> None:
        last = self._last
        if last is None:
            self._say("there is no answer yet")
            return
        if not self._ask(list(last.messages)):
            return
        if self._last is not None and self._last.text == last.text:
            self._say("the same answer again; with --temperature 1 others come")
            return
        self._before = last
        self._say("/good: better than the answer before; /bad: the one before was better")

    # ------------------------------------------------------------------ feedback

    def _rate(self, *, good: bool) -> None:
        last, before = self._last, self._before
        if last is None:
            self._say("there is no answer yet")
        elif before is None:
            self._teach(last, {"rating": good})
        else:
            better, worse = (last, before) if good else (before, last)
            pair = {"chosen": better.text, "rejected": worse.text}
            if self._teach(better, {"preference": pair}):
                self._before = None
                self._keep(better)

    def _edit(self, text: str) -> None:
        last = self._last
        if last is None:
            self._say("there is no answer yet")
            return
        wanted = (text or self._terminal.edit(last.text)).strip()
        if not wanted or wanted == last.text.strip():
            self._say("nothing was changed, and nothing is sent")
        elif self._teach(last, {"demonstration": wanted}):
            self._before = None
            self._keep(Answer(last.messages, wanted))

    def _teach(self, about: Answer, said: dict[str, Any]) -> bool:
        """Send what was said about an answer, and say what becomes of it; whether it is stored."""
        if not self._adapter and about.version in ("", BASE):
            self._say("say first which adapter learns: /adapter NAME (any name)")
            return False
        learner = {"adapter": self._adapter} if self._adapter else {}
        explicit = {
            "model": self._server.model(),
            "messages": list(about.messages),
            "completion": about.text,
        }
        if "preference" in said:
            del explicit["completion"]
        stored = None
        if about.completion_id:
            try:
                body = {"completion_id": about.completion_id, **said, **learner}
                stored = self._server.send_feedback(body)
            except ChatError as error:
                if error.param != "completion_id":  # else its receipt is gone, or there are none
                    raise
        if stored is None:
            if not about.ended and (said.get("rating") or "preference" in said):
                self._say(
                    "that answer has no end, and would teach to end there: /retry, or write it with"
                    " /edit"
                )
                return False
            stored = self._server.send_feedback({**explicit, **said, **learner})
        self._adapter = self._adapter or str(stored.get("adapter", ""))
        self._say(self._fate(stored))
        return True

    def _fate(self, stored: dict[str, Any]) -> str:
        """What becomes of feedback, in words."""
        adapter, samples = stored.get("adapter", ""), stored.get("samples") or []
        if note := (stored.get("learning") or {}).get("note"):
            return f"stored for {adapter}: {note}"
        if problems := [each["problem"] for each in samples if each.get("problem")]:
            return f"stored for {adapter}, but nothing can be learned from it: {problems[0]}"
        if not samples:
            return f"stored for {adapter}; nothing is learned from it"
        if all(each.get("split") == "held_out" for each in samples):
            return f"stored for {adapter}: held out, to measure its versions by"
        then = (stored.get("learning") or {}).get("next")
        soon = begins(then) if then else "learned soon"
        return f"stored for {adapter}: {soon} (tandem adapters watch {adapter})"

    # ------------------------------------------------------------------ words

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True, style="dim")

    def _fail(self, error: ChatError) -> None:
        self._console.print(f"error: {error}", markup=False, soft_wrap=True, style="red")


def converse(server: ChatServer, console: Console, system: str = "", adapter: str = "") -> int:
    """Read turns until the user leaves; the exit code."""
    return Conversation(server, Terminal(console), system, adapter).run()
