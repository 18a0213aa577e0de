# SPDX-License-Identifier: Apache-2.0
"""The suite for real chat models: questions with one short right answer. Written by check_suites.py."""

import itertools
import random

SEED = 20261201
ARITHMETIC = ((17, 23), (12, 12), (29, 14), (48, 25), (64, 31), (123, 8))
CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima", "Norway": "Oslo",
    "Portugal": "Lisbon", "Kenya": "Nairobi", "Austria": "Vienna",
}  # fmt: skip
TRANSLATIONS = {  # asked language, English word, answer
    ("German", "house"): "Haus", ("German", "water"): "Wasser", ("French", "book"): "livre",
    ("French", "dog"): "chien", ("Spanish", "milk"): "leche", ("Spanish", "street"): "calle",
    ("Italian", "sun"): "sole", ("Italian", "bread"): "pane", ("French", "red"): "rouge",
}  # fmt: skip
FACTS = {
    "How many minutes are in two hours?": "120",
    "What is the chemical symbol of gold?": "Au", "What is the boiling point of water in degrees Celsius at sea level?": "100",
    "Which planet is known as the Red Planet?": "Mars", "Who wrote Romeo and Juliet?": "Shakespeare",
    "What is the square root of 144?": "12", "How many days does a leap year have?": "366",
    "Which gas do plants take in for photosynthesis?": "carbon dioxide", "What is the largest ocean on Earth?": "Pacific",
}  # fmt: skip
REVERSED = ("stone", "market", "bridge", "winter", "garden", "silver")
CODE = {  # a task for Python and what a right answer must show
    "Write a Python function add that returns the sum of a and b.": "def add(",
    "Write a Python function is_even that returns whether n is even.": "% 2",
    "Write a Python for loop that prints the numbers from 3 to 9.": "range(3, 10)",
    "Write a Python class Point with the fields x and y.": "class Point",
    "Write a Python one-liner that reverses the string s by slicing.": "[::-1]",
    "Write a Python function square that returns n squared.": "def square(",
}
TOOLS = {
    name: {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": sorted(properties),
                "additionalProperties": False,
            },
        },
    }
    for name, about, properties in (
        ("get_weather", "The current weather of a city.", {"city": {"type": "string"}}),
        ("set_timer", "Starts a timer.", {"minutes": {"type": "integer", "minimum": 1}}),
        ("send_message", "Sends a text message.", {"to": {"type": "string"}, "text": {"type": "string"}}),
        ("book_table", "Books a table.", {"city": {"type": "string"}, "people": {"type": "integer"}}),
    )
}
CALLS = (
    ("What is the weather in Oslo right now?", "get_weather", {"city": "Oslo"}),
    ("Set a timer for 25 minutes.", "set_timer", {"minutes": 25}),
    ("Send Clara the message: dinner at eight", "send_message", {"to": "Clara", "text": "dinner at eight"}),
    ("Book a table for 4 people in Lisbon.", "book_table", {"city": "Lisbon", "people": 4}),
)
SUBJECTS = ("The baker", "A young engineer", "The ferry captain", "My neighbour", "The librarian",
            "An old gardener", "The night porter", "A travelling musician", "The clockmaker", "The school nurse")
ACTS = ("waited for the first train", "repaired the blue gate", "counted the empty boxes", "wrote a short letter",
        "carried two baskets of apples", "painted the western wall", "looked for a lost key",
        "read the newspaper aloud", "closed the shop before noon", "watered the tomatoes")
PLACES = ("near the harbour", "behind the old mill", "on the market square", "in the quiet library",
          "by the river", "under the railway bridge", "in front of the town hall", "at the edge of the forest")
WORKLOADS = {
    "chat": (
        "Say hello to Nadia and ask her how her day was, in two sentences.",
        "Explain in three sentences why the sky is blue.",
        "Give me three short tips for a good night's sleep.",
        "Describe a rainy afternoon in a small town in four sentences.",
    ),
    "code": tuple(CODE)[:4],
    "json": (
        'Answer with JSON only: an object with the keys "city" and "country" for Paris.',
        'Answer with JSON only: a list of the first five even numbers under the key "numbers".',
        'Answer with JSON only: {"name": ..., "age": ...} for Tom, who is 31.',
        'Answer with JSON only: an object that maps each of the words one, two, three to its number.',
    ),
    "non-english": (
        "Erkläre in drei Sätzen, warum der Himmel blau ist.",
        "Donne trois conseils courts pour bien dormir.",
        "Describe una tarde de lluvia en un pueblo pequeño en cuatro frases.",
        "请用三句话介绍一下北京。",
    ),
    "thinking": (
        "Think step by step: a train leaves at 14:20 and arrives at 17:05. How long does it travel?",
        "Think step by step: what is 38 + 47 - 12?",
        "Think step by step: Anna is older than Ben, Ben is older than Carl. Who is the youngest?",
        "Think step by step: a shirt costs 40 euros after a discount of 20 percent. What did it cost before?",
    ),
}


def agreement():
    """64 questions with one right answer each."""
    r = random.Random(SEED)
    asked = [(f"What is {a} x {b}? Answer with the number.", str(a * b))
             for a, b in zip(r.sample(range(11, 60), 12), r.sample(range(3, 30), 12), strict=True)]
    asked += [(f"What is {a} + {b} - {c}? Answer with the number.", str(a + b - c))
              for a, b, c in ((r.randint(200, 900), r.randint(100, 500), r.randint(10, 99)) for _ in range(8))]
    asked += [(f"What is the capital of {country}?", city) for country, city in CAPITALS.items()]
    asked += [(f"Translate the word {word} to {language}. Answer with one word.", answer)
              for (language, word), answer in TRANSLATIONS.items()]
    asked += list(FACTS.items())
    asked += [(f"Write the word {word} backwards. Answer with one word.", word[::-1]) for word in REVERSED]
    asked += list(CODE.items())
    asked += [(f"Which of these numbers is the largest: {', '.join(map(str, numbers))}?", str(max(numbers)))
              for numbers in (r.sample(range(100, 1000), 5) for _ in range(6))]
    return [{"id": f"q{n}", "user": user, "expect": expect} for n, (user, expect) in enumerate(asked, 1)]


def chat():
    """The suite for real chat models."""
    return {
        "name": "chat",
        "seed": SEED,
        "max_tokens": 1024,
        "tools": TOOLS,
        "arithmetic": [
            {"id": f"{a}x{b}", "user": f"What is {a} x {b}?", "expect": str(a * b)} for a, b in ARITHMETIC
        ],
        "tool-call": [
            {"id": name, "user": user, "tools": list(TOOLS), "expect": {"name": name, "arguments": arguments}}
            for user, name, arguments in CALLS
        ],
        "recall": {
            "plant": "Remember this: the secret code is {code}.",
            "question": "\n\nWhat is the secret code in the text above? Answer with the code.",
            "filler": [f"{who} {did} {where}." for who, did, where in itertools.product(SUBJECTS, ACTS, PLACES)],
        },
        "workloads": {
            name: [{"id": f"{name}-{n}", "user": user} for n, user in enumerate(users, 1)]
            for name, users in WORKLOADS.items()
        },
        "agreement": agreement(),
    }
