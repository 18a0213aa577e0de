"""A run as it is kept on file: run.json, and one line for each exchange and event in exchanges.jsonl.

The checks judge a Recording and nothing else, so a folder gives the verdict again.
"""

import json
import threading
from pathlib import Path

from launcher.checks.exchange import Exchange
from launcher.checks.server import Facts
from launcher.flags import UsageError

RUN, EXCHANGES = "run.json", "exchanges.jsonl"
FORMAT = 1


class Recording:
    """``run``: options, seed, suite and versions as plain data. ``facts``: Facts by server.

    With a ``folder`` everything added is written there at once, so that a run that is cut off is on
    file as far as it went.
    """

    def __init__(self, run, facts, folder=None):
        self.run, self.facts = run, facts
        self.exchanges, self.events = [], []
        self._lock = threading.Lock()
        self._file = None if folder is None else Path(folder) / EXCHANGES

    def add(self, exchange):
        with self._lock:
            self._write({"exchange": exchange.on_file()})
            self.exchanges.append(exchange)

    def note(self, check, kind, **data):
        """An event of ``check``: "not run" and "stopped" with a message, or one a check reads itself."""
        event = {"check": check, "kind": kind, **data}
        with self._lock:
            self._write({"event": event})
            self.events.append(event)

    def _write(self, line):
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")

    def find(self, check, *, server=None, item=None, step=None):
        """Exchanges of ``check`` in the order they were asked, narrowed by what is given."""
        return [
            e
            for e in self.exchanges
            if e.check == check
            and server in (None, e.server)
            and item in (None, e.item)
            and step in (None, e.step)
        ]

    def one(self, check, item, server="target", step=""):
        """The exchange with that key, None where it was not asked."""
        found = self.find(check, server=server, item=item, step=step)
        return found[-1] if found else None

    def event(self, check, kind):
        return next((e for e in self.events if (e["check"], e["kind"]) == (check, kind)), None)

    def events_of(self, check, kind):
        return [e for e in self.events if (e["check"], e["kind"]) == (check, kind)]


def create(folder):
    """Makes the folder of a new run.

    Raises: UsageError when it is there and not empty, or cannot be made.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"--out {folder}: the folder is not empty")
    except OSError as error:
        raise UsageError(f"--out {folder}: no folder can be made there ({error.strerror})") from None
    return folder


def write_json(path, content):
    Path(path).write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def load(folder):
    """The Recording in ``folder``. A last line that was cut off is left out, and said in its run.

    Raises: UsageError when there is no such record, or one of another format.
    """
    folder = Path(folder)
    try:
        run = json.loads((folder / RUN).read_text("utf-8"))
        lines = (folder / EXCHANGES).read_text("utf-8").split("\n") if (folder / EXCHANGES).exists() else []
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: no check is on file there ({error})") from None
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        raise UsageError(f"{folder / RUN}: not a check's record of format {FORMAT}")
    facts = {name: Facts(**found) for name, found in run["servers"].items()}
    recording = Recording(run, facts)
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            found = json.loads(line)
            if "exchange" in found:
                recording.exchanges.append(Exchange(**found["exchange"]))
            else:
                recording.events.append(found["event"])
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):  # every whole line ends in a newline
                continue
            raise UsageError(f"{folder / EXCHANGES}:{number}: not an exchange ({error})") from None
    return recording
