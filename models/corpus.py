# SPDX-License-Identifier: Apache-2.0
"""The synthetic corpus the shipped pair is trained on: eight kinds of small chat tasks.

Every conversation is drawn from a seeded `random.Random`, so a seed names a corpus. A kind's
function returns the turns of one exchange; the answer follows from the prompt alone, which is
what makes greedy decoding confident. Nothing here is downloaded.

Sizes: closed tables (products, greetings, capitals) are small enough to be memorised; codes,
names, tool arguments and spans are open and must be copied from the prompt.
Raises: nothing
"""
from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

NAMES = ("Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karl Lena Mia Noah Olga Paul Rosa "
         "Sam Tina Uwe Vera Willi Yara Zoe Alice Bob Carol Dan Eva Frank").split()
CITIES = ("Paris Berlin Madrid Rome Vienna London Lisbon Athens Oslo Dublin Prague Warsaw Cairo "
          "Tokyo Lima Boston Hamburg Zurich").split()
CAPITALS = {"France": "Paris", "Germany": "Berlin", "Spain": "Madrid", "Italy": "Rome",
            "Austria": "Vienna", "Portugal": "Lisbon", "Greece": "Athens", "Norway": "Oslo",
            "Ireland": "Dublin", "Poland": "Warsaw", "Egypt": "Cairo", "Japan": "Tokyo",
            "Peru": "Lima"}
COLORS = "red blue green yellow black white brown gray orange".split()
THINGS = "door box house garden river tower bridge boat lamp key room window table chair".split()
WORDS = ("planet river stone window garden silver winter summer letter number paper music "
         "market bottle bridge castle forest island ladder mirror orange pencil rabbit").split()
SUBJECTS = ("The baker,The teacher,The old man,A young girl,The driver,My neighbor,The farmer,"
            "The doctor,A small dog,The gray cat,The captain,The painter").split(",")
VERBS = ("walks,waits,sings,works,sleeps,reads,looks around,sits,talks,rests,eats,plays").split(",")
PLACES = ("in the garden,near the river,at the market,behind the house,on the bridge,by the window,"
          "in the kitchen,under the tree,at the station,in the library,next to the tower").split(",")
TIMES = ("every morning,in the evening,after lunch,on Monday,during the summer,all day,"
         "before sunset,in the winter,at noon,once a week").split(",")
MONTHS = ("January February March April May June July August September October November "
          "December").split()
OPS = {"adds": "+", "subtracts": "-", "multiplies": "*", "divides": "/"}


@dataclass
class Exchange:
    """One question with its answer. `check` is what a scorer looks for in the answer."""
    kind: str
    user: str
    answer: str
    check: str = ""
    tools: list[dict] = field(default_factory=list)
    follow: list[tuple[str, str]] = field(default_factory=list)  # further (role, content) turns


def made_up(r: random.Random, syllables: int = 0) -> str:
    """Return a lower-case word nobody has seen, so that copying has to be learned."""
    n = syllables or r.choice((2, 2, 3))
    return "".join(r.choice("bdfgklmnprstvz") + r.choice("aeiou") for _ in range(n))


def person(r: random.Random) -> str:
    return r.choice(NAMES) if r.random() < 0.5 else made_up(r).capitalize()


def place(r: random.Random) -> str:
    return r.choice(CITIES) if r.random() < 0.5 else made_up(r).capitalize()


def chat(r: random.Random) -> Exchange:
    n, t = person(r), r.choice(THINGS)
    c = r.choice(COLORS)
    country = r.choice(sorted(CAPITALS))
    user, answer, check = r.choice((
        (r.choice((f"Hello, I am {n}.", f"Hi! My name is {n}.", f"Hello! I am {n}. Who are you?")),
         f"Hello {n}! It is nice to meet you. I am a small model. How can I help you today?", n),
        (r.choice(("Hello!", "Hi!", "Hello", "Good morning!")),
         "Hello! It is nice to meet you. I am a small model. How can I help you today?", "small model"),
        (r.choice(("How are you?", "How are you today?")),
         "I am fine, thank you. I am a small model and I am ready to help you. How are you?", "fine"),
        (r.choice(("Who are you?", "What are you?")),
         "I am a small model. I can count, multiply, call tools, write code and remember a code.",
         "small model"),
        (r.choice(("Thank you!", "Thanks!", "Thank you very much.")),
         "You are welcome! I was glad to help you. Tell me if you need anything else today.", "welcome"),
        (f"Good night, my name is {n}.",
         f"Good night {n}! Sleep well. I will be here to help you again tomorrow.", n),
        (f"My favorite color is {c}. What is my favorite color?",
         f"Your favorite color is {c}. You told me that you like the color {c} the most.", c),
        (f"Say something about the {c} {t}.",
         f"I like the {c} {t}. The {t} is {c}, and everybody who sees the {c} {t} likes it too.", c),
        (f"What is the capital of {country}?",
         f"The capital of {country} is {CAPITALS[country]}. Many people visit {CAPITALS[country]} "
         f"when they travel to {country}.", CAPITALS[country]),
    ))
    return Exchange("chat", user, answer, check)


def arithmetic(r: random.Random, a: int = 0, b: int = 0) -> Exchange:
    a, b = a or r.randint(2, 30), b or r.randint(2, 30)
    if r.random() < 0.2 and a > 1:
        return Exchange("arithmetic", r.choice((f"What is {a} + {b}?", f"Add {a} and {b}.")),
                        f"{a} + {b} = {a + b}. The sum of {a} and {b} is {a + b}.", str(a + b))
    user = r.choice((f"What is {a} x {b}?", f"What is {a} x {b}? Show the steps.", f"Compute {a} x {b}.",
                     f"What is {a} times {b}?", f"Multiply {a} by {b}.", f"{a} * {b} = ?"))
    tens, ones = b // 10 * 10, b % 10
    steps = f" Step by step: {a} x {tens} = {a * tens}, {a} x {ones} = {a * ones}, and " \
            f"{a * tens} + {a * ones} = {a * b}." if tens and ones else \
            f" The product of {a} and {b} is {a * b}."
    return Exchange("arithmetic", user, f"{a} x {b} = {a * b}." + steps, str(a * b))


def thinking(r: random.Random) -> Exchange:
    a, b = r.randint(11, 89), r.randint(11, 89)
    ones, tens = a % 10 + b % 10, (a // 10 + b // 10) * 10
    user = r.choice((f"Think first: what is {a} + {b}?", f"Think step by step: {a} + {b}."))
    return Exchange("thinking", user,
                    f"<think>\n{a % 10} + {b % 10} = {ones}, {a // 10 * 10} + {b // 10 * 10} = {tens}, "
                    f"{tens} + {ones} = {a + b}.\n</think>\nThe answer is {a + b}.", str(a + b))


def _tool(name: str, about: str, *args: str) -> dict:
    props = {a: {"type": "integer" if a in ("minutes", "a", "b", "people") else "string"} for a in args}
    return {"type": "function", "function": {
        "name": name, "description": about,
        "parameters": {"type": "object", "properties": props, "required": list(args)}}}


TOOLS = {t["function"]["name"]: t for t in (
    _tool("get_weather", "Current weather of a city.", "city"),
    _tool("set_timer", "Start a timer.", "minutes"),
    _tool("add_numbers", "Add two numbers.", "a", "b"),
    _tool("send_message", "Send a message to a person.", "to", "text"),
    _tool("search", "Search the web.", "query"),
    _tool("turn_on", "Turn on a device in a room.", "device", "room"),
    _tool("book_table", "Book a table in a city.", "city", "people"),
    _tool("translate", "Translate a word.", "word", "language"))}


def tool_call(r: random.Random, name: str = "") -> Exchange:
    name = name or r.choice(sorted(TOOLS))
    c, n, w, k = place(r), person(r), made_up(r), r.randint(2, 90)
    k2, device, room = r.randint(2, 90), r.choice(("lamp", "radio", "heater", "fan")), r.choice(
        ("kitchen", "garden", "bathroom", "library", "cellar"))
    lang = r.choice(("German", "Spanish", "French", "Italian"))
    asks, args = {
        "get_weather": ((f"What is the weather in {c}?", f"How is the weather in {c} today?"), {"city": c}),
        "set_timer": ((f"Set a timer for {k} minutes.", f"Start a timer of {k} minutes."), {"minutes": k}),
        "add_numbers": ((f"Add {k} and {k2} with the tool.",), {"a": k, "b": k2}),
        "send_message": ((f"Send {n} the message {w}.", f"Tell {n}: {w}"), {"to": n, "text": w}),
        "search": ((f"Search the web for {w}.", f"Look up {w} on the web."), {"query": w}),
        "turn_on": ((f"Turn on the {device} in the {room}.",), {"device": device, "room": room}),
        "book_table": ((f"Book a table for {k} people in {c}.",), {"city": c, "people": k}),
        "translate": ((f"Translate {w} to {lang}.", f"What is {w} in {lang}?"),
                      {"word": w, "language": lang})}[name]
    others = [t for t in sorted(TOOLS) if t != name]
    names = [name] + r.sample(others, r.randint(0, 3))
    r.shuffle(names)
    call = json.dumps({"name": name, "arguments": args})
    ex = Exchange("tool", r.choice(asks), f"<tool_call>\n{call}\n</tool_call>", call,
                  [TOOLS[t] for t in names])
    if name == "get_weather" and r.random() < 0.5:
        sky = r.choice(("clear", "cloudy", "gray"))
        ex.follow = [("tool", json.dumps({"city": c, "temperature": k, "sky": sky})),
                     ("assistant", f"The weather in {c} is {sky} and the temperature is {k} degrees.")]
    return ex


def code(r: random.Random) -> Exchange:
    verb, f = r.choice(sorted(OPS)), r.choice((r.choice(WORDS), made_up(r)))
    x, y = r.sample("abcdxyz", 2)
    a = r.randint(1, 20)
    b = a + r.randint(3, 12)
    user, answer, check = r.choice((
        (f"Write a Python function {f} that {verb} {x} and {y}.",
         f"```python\ndef {f}({x}, {y}):\n    return {x} {OPS[verb]} {y}\n```",
         f"return {x} {OPS[verb]} {y}"),
        (f"Write a Python loop that prints the numbers from {a} to {b}.",
         f"```python\nfor i in range({a}, {b + 1}):\n    print(i)\n```", f"range({a}, {b + 1})"),
        (f"Write a Python class {f.capitalize()} with the field {x}.",
         f"```python\nclass {f.capitalize()}:\n    def __init__(self, {x}):\n        self.{x} = {x}\n```",
         f"self.{x} = {x}"),
        (f"Write a Python function {f} that prints the word {(w := r.choice(WORDS))}.",
         f"```python\ndef {f}():\n    print(\"{w}\")\n```", f'print("{w}")'),
    ))
    return Exchange("code", user, answer, check)


def listing(r: random.Random) -> Exchange:
    a, n, step = r.randint(1, 80), r.randint(6, 14), r.choice((1, 1, 1, 2, 5, 10))
    up = [str(a + i * step) for i in range(n)]
    i, j = sorted(r.sample(range(12), 2))
    lo = r.randint(0, 14)
    abc = [chr(97 + k) for k in range(lo, min(26, lo + r.randint(5, 11)))]
    w = r.choice((r.choice(WORDS), made_up(r, 3)))
    by = f" in steps of {step}" if step > 1 else ""
    user, items = r.choice((
        (f"Count from {up[0]} to {up[-1]}{by}.", up),
        (f"Count down from {up[-1]} to {up[0]}{by}.", up[::-1]),
        (f"List the months from {MONTHS[i]} to {MONTHS[j]}.", MONTHS[i:j + 1]),
        (f"List the letters from {abc[0]} to {abc[-1]}.", abc),
        (f"Spell the word {w}.", list(w))))
    text = ", ".join(items)
    end = f"This is how {w} is spelled." if user.startswith("Spell") else \
        f"That is everything from {items[0]} to {items[-1]}."
    return Exchange("list", user, f"{text}. {end}", text)


def non_english(r: random.Random) -> Exchange:
    n, a = person(r), r.randint(1, 40)
    nums = ", ".join(map(str, range(a, a + r.randint(5, 10))))
    last = nums.split(", ")[-1]
    user, answer, check = r.choice((
        (f"Hallo, ich heiße {n}.",
         f"Hallo {n}! Schön, dich zu sehen. Ich bin ein kleines Modell. Wie geht es dir heute?", n),
        ("Guten Tag!",
         "Guten Tag! Schön, dich zu sehen. Ich bin ein kleines Modell. Wie geht es dir heute?", "Modell"),
        (f"Zähle von {a} bis {last}.", f"{nums}. Ich habe von {a} bis {last} gezählt.", nums),
        (f"Hola, me llamo {n}.",
         f"¡Hola {n}! Me alegro de verte. Soy un modelo pequeño. ¿Cómo estás hoy?", n),
        (f"Cuenta de {a} a {last}.", f"{nums}. He contado de {a} a {last}.", nums)))
    return Exchange("non_english", user, answer, check)


def sentence(r: random.Random) -> str:
    """Return one filler sentence; a tenth are made-up words, a tenth carry harmless numbers."""
    p = r.random()
    if p < 0.1:
        return " ".join(made_up(r) for _ in range(r.randint(4, 9))).capitalize() + "."
    if p < 0.2:
        return f"There are {r.randint(2, 999)} {r.choice(WORDS)}s {r.choice(PLACES)}."
    return f"{r.choice(SUBJECTS)} {r.choice(VERBS)} {r.choice(PLACES)} {r.choice(TIMES)}."


def filler(r: random.Random, chars: int) -> list[str]:
    out, n = [], 0
    while n < chars:
        out.append(sentence(r))
        n += len(out[-1]) + 1
    return out


def recall(r: random.Random, chars: int, depth: float | None = None) -> list[Exchange]:
    """Return 1 to 3 questions on codes planted in about `chars` characters of filler.

    The first exchange carries the text; `depth` in [0, 1] is where the asked code is planted.
    """
    body, n = filler(r, chars), r.choice((1, 1, 2, 3))
    keys = [""] if n == 1 and r.random() < 0.7 else \
        [f" of the {c} {t}" for c, t in zip(r.sample(COLORS, n), r.sample(THINGS, n))]
    codes = ["-".join(r.choice("0123456789") for _ in range(r.choice((4, 4, 5, 6)))) for _ in keys]
    for key, value in zip(keys, codes):
        at = round((r.random() if depth is None else depth) * len(body))
        body.insert(at, r.choice(("The", "Remember this: the", "The secret", "The")) + f" code{key} is {value}.")
    order = list(zip(keys, codes))
    r.shuffle(order)
    out = []
    for key, value in order:
        ask = r.choice((f"What is the code{key}?", f"What was the code{key}?", f"Repeat the code{key}."))
        out.append(Exchange("recall", ask, f"The code{key} is {value}. I repeat: the code{key} is {value}.",
                            value))
    text = " ".join(body)
    out[0].user = r.choice((f"{text}\n\n{out[0].user}", f"{text} {out[0].user}",
                            f"Read this text.\n{text}\n\n{out[0].user}"))
    return out


SHORT_KINDS = {"chat": chat, "arithmetic": arithmetic, "tool": tool_call, "code": code,
               "list": listing, "non_english": non_english, "thinking": thinking}
SYSTEM = ("", "", "", "You are a helpful assistant.", "You are a small helpful model. Answer briefly.")


def conversation(r: random.Random, chars: int = 0) -> tuple[list[dict], list[dict]]:
    """Return (messages, tools): a conversation of 1 to 3 exchanges; long when `chars` is set."""
    if chars:
        exs = recall(r, chars)
        if r.random() < 0.3:  # the same length, another task at its end
            exs.append(SHORT_KINDS[r.choice(sorted(SHORT_KINDS))](r))
    else:
        exs = [recall(r, r.randint(0, 400))[0] if r.random() < 0.15 else
               SHORT_KINDS[r.choice(sorted(SHORT_KINDS))](r) for _ in range(r.choice((1, 1, 1, 2, 3)))]
    return assemble(r, exs)


def assemble(r: random.Random, exs: list[Exchange]) -> tuple[list[dict], list[dict]]:
    """Return (messages, tools) of a conversation made of these exchanges."""
    tools = {t["function"]["name"]: t for e in exs for t in e.tools}
    messages, system = [], r.choice(SYSTEM)
    if system:
        messages.append({"role": "system", "content": system})
    for e in exs:
        messages += [{"role": "user", "content": e.user}, {"role": "assistant", "content": e.answer}]
        messages += [{"role": role, "content": text} for role, text in e.follow]
    return messages, list(tools.values())
