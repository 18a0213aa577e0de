"""The prompts of a suite (suites/*.json), each with what a right answer contains; texts of any length."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

SUITES = tuple(sorted(file.stem for file in (Path(__file__).parent / "suites").glob("*.json")))
WORKLOADS = ("chat", "code", "json", "non-english", "thinking")


@dataclass(frozen=True)
class Prompt:
    """One request's content. ``expect``: a text, a tool call ({name, arguments}), or None."""

    id: str
    user: str
    expect: object = None
    tools: tuple = ()
    max_tokens: int = 0

    def body(self):
        body = {"messages": [{"role": "user", "content": self.user}], "max_tokens": self.max_tokens}
        return body | ({"tools": list(self.tools)} if self.tools else {})


class Suite:
    """``max_tokens`` and ``seed`` override the file's; ``most`` is how many prompts of a kind are used."""

    def __init__(self, name, *, max_tokens=None, seed=None, most=None):
        file = Path(__file__).parent / "suites" / f"{name}.json"
        self._data = json.loads(file.read_text("utf-8"))
        self.name, self._most = name, most
        self.max_tokens = max_tokens or self._data["max_tokens"]
        self.seed = self._data["seed"] if seed is None else seed

    def _prompt(self, entry):
        tools = tuple(self._data["tools"][name] for name in entry.get("tools", ()))
        return Prompt(entry["id"], entry["user"], entry.get("expect"), tools, self.max_tokens)

    def prompts(self, check):
        """The suite's prompts of a check, in order."""
        return [self._prompt(entry) for entry in self._data[check][: self._most]]

    def workload(self, name):
        return [self._prompt(entry) for entry in self._data["workloads"][name][: self._most]]

    def agreement(self, count):
        """``count`` of the agreement prompts, spread evenly over their kinds; all where there are fewer."""
        entries = self._data["agreement"]
        count = min(count, len(entries))
        return [self._prompt(entries[i * len(entries) // count]) for i in range(count)]

    def text(self, sentences, salt):
        """Filler of that many sentences; the same for the same salt and seed."""
        r = random.Random(f"{self.seed}/{salt}")
        return [r.choice(self._data["recall"]["filler"]) for _ in range(sentences)]

    def recall(self, id, sentences, position):
        """A code planted at ``position`` (0 the beginning, 1 the end) of a text, and the question after it."""
        recall = self._data["recall"]
        body = self.text(sentences, id)
        code = self.code(id)
        body.insert(round(position * len(body)), recall["plant"].format(code=code))
        return Prompt(id, " ".join(body) + recall["question"], code, (), self.max_tokens)

    def code(self, id):
        """The code planted in the text ``id``: four digits with dashes between them."""
        return "-".join(random.Random(f"{self.seed}/code/{id}").choices("0123456789", k=4))


def suite_of(options):
    """The Suite that a run's Options ask for."""
    return Suite(options.suite, max_tokens=options.max_tokens, seed=options.seed, most=options.prompts)
