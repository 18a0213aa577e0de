"""Right or wrong: the expected text in an answer, a tool call that validates, output that degenerates."""

import json
import re

from launcher.checks.result import CUT, ERROR, FAIL, PASS, Item

# A loop is at least this many tokens long (or words, where the server gave no ids) and this many times
# the same; it counts when the answer ends in it. A count to a hundred or a code said twice is no loop.
LOOP_TOKENS, LOOP_TIMES, LOOP_PERIOD = 24, 4, 48
SAME_TOKEN_TIMES = 12
MARKS = re.compile(r"[!?.,;:*#\-_]{16,}|!{8,}")
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def not_an_answer(exchange, name=None):
    """An Item for a request that failed or was cut, None for a whole answer."""
    name = name or exchange.item
    if not exchange.answered:
        return Item(name, ERROR, f"{exchange.problem}: {exchange.message}")
    if exchange.cut:
        return Item(name, CUT, f"cut by max_tokens after {exchange.completion_tokens} tokens")
    return None


def contains(exchange, expect):
    """Is the expected text in the answer? Digits must stand alone; commas in numbers do not count."""
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", exchange.text)
    if re.fullmatch(r"[\d-]+", expect):
        return re.search(rf"(?<![\d-]){re.escape(expect)}(?![\d-])", text) is not None
    return expect.casefold() in text.casefold()


def judge_text(exchange, expect):
    """The Item of an answer that must contain ``expect``."""
    if contains(exchange, expect):
        if exchange.cut:
            return not_an_answer(exchange)
        return Item(exchange.item, PASS, expect)
    return not_an_answer(exchange) or Item(
        exchange.item, FAIL, f"expected {expect!r}, answered {shorten(exchange.text)!r}"
    )


def shorten(text, length=80):
    return text if len(text) <= length else text[: length - 3] + "..."


def judge_tool_call(exchange, tools, expect):
    """The Item of an answer that must call the tool of ``expect`` ({name, arguments}) with valid JSON."""
    trouble = not_an_answer(exchange)
    if trouble:
        return trouble
    name, arguments, problem = _tool_call(exchange)
    problem = problem or _validate(name, arguments, tools) or _other_call(name, arguments, expect)
    if problem:
        return Item(exchange.item, FAIL, problem)
    return Item(exchange.item, PASS, f"{name}({json.dumps(arguments)})")


def _tool_call(exchange):
    """(name, arguments, problem); out of the text where the server has no tool-call parser."""
    if exchange.tool_calls:
        call = exchange.tool_calls[0].get("function") or {}
        name, arguments = call.get("name"), call.get("arguments")
    else:
        found = _CALL.search(exchange.text)
        if not found:
            return None, None, f"no tool call: {shorten(exchange.text)!r}"
        try:
            call = json.loads(found[1])
            name, arguments = call["name"], call["arguments"]
        except (ValueError, KeyError, TypeError):
            return None, None, f"the call is not JSON with name and arguments: {shorten(found[1])!r}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None, None, f"the arguments are not JSON: {shorten(arguments)!r}"
    return name, arguments, None


def _validate(name, arguments, tools):
    import jsonschema

    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if name not in schemas:
        return f"called {name!r}, which was not offered"
    try:
        jsonschema.validate(arguments, schemas[name])
    except jsonschema.ValidationError as error:
        return f"the arguments of {name} do not validate: {shorten(error.message)}"
    return None


def _other_call(name, arguments, expect):
    if name != expect["name"]:
        return f"called {name}, expected {expect['name']}"
    for key, value in expect["arguments"].items():
        # "Oslo, Norway" is Oslo; 12 is not 120.
        got = arguments.get(key)
        same = str(value).casefold() in str(got).casefold() if isinstance(value, str) else got == value
        if not same:
            return f"{name}: {key} is {got!r}, expected {value!r}"
    return None


def degenerate(exchange):
    """What makes a whole answer degenerate, None where nothing does."""
    text = exchange.reasoning + exchange.text
    if not text.strip() and not exchange.tool_calls:
        return "an empty answer"
    marks = MARKS.search(text)
    if marks:
        return f"{len(marks[0])} marks in a row: {shorten(marks[0], 20)!r}"
    sequence = exchange.tokens or text.split()
    loop = _loop(sequence)
    if loop:
        period, times = loop
        what = "one token" if period == 1 else f"a phrase of {period} tokens"
        return f"{what} {times} times over: {shorten(text[-60:])!r}"
    return None


def _loop(sequence):
    """(period, times) of the loop the sequence ends in or runs through, None where there is none."""
    for period in range(1, LOOP_PERIOD + 1):
        run = longest = 0
        for before, after in zip(sequence, sequence[period:]):
            run = run + 1 if before == after else 0
            longest = max(longest, run)
        times = (longest + period) // period
        enough = SAME_TOKEN_TIMES if period == 1 else max(LOOP_TIMES, -(-LOOP_TOKENS // period))
        if longest and times >= enough:
            return period, times
    return None
