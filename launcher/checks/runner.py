"""Asks the checks and judges what came back; a folder on file is judged by the same code.

from launcher.checks import runner
from launcher.checks.options import Options
verdict = runner.run(Options(url="http://127.0.0.1:30000", suite="pair"), "out")
verdict["checks"]["arithmetic"]["status"]     # "pass", "fail", "not run", "error", "cut", "skipped"
"""

import json
import platform
import time
import uuid
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from launcher.checks import record
from launcher.checks.equal import DRAFTED
from launcher.checks.options import from_json
from launcher.checks.record import Recording
from launcher.checks.registry import CHECKS
from launcher.checks.result import ERROR, FAIL, NOT_RUN, PASS, SKIPPED, Result
from launcher.checks.server import Server, ServerGone, facts_json
from launcher.checks.session import CONTROL, ONE_CHUNK, TARGET, UNDRAFTED, NotRun, Session
from launcher.checks.suite import suite_of
from launcher.flags import UsageError
from launcher.probe import installed_versions

SCHEMA_VERSION = 1
VERDICT = "verdict.json"
EXIT_CODES = {PASS: 0, FAIL: 3, "incomplete": 3}


def selected(options):
    """The ids of the checks asked for, in the registry's order.

    Raises: UsageError for an id there is not.
    """
    for id in (*options.only, *options.skip):
        if id not in CHECKS:
            raise UsageError(f"there is no check {id}; there are {', '.join(CHECKS)}")
    return [id for id in CHECKS if id not in options.skip and (not options.only or id in options.only)]


def run(options, folder, *, api_key=None, progress=None, command=None):
    """Asks every selected check, keeps all of it in ``folder``, and returns the verdict as plain data.

    ``progress(check, asked, what)`` is called at each answer. ``command``: as typed, for the record.
    Raises: UsageError before anything is asked
    """
    chosen = selected(options)
    undrafted = None
    if options.undrafted and not options.undrafted.startswith(("http://", "https://")):
        undrafted = _recorded_undrafted(options)
    servers = _servers(options, api_key)
    folder = record.create(folder)
    salt = uuid.uuid4().hex[:12]
    lost = _connect(servers)
    recording = Recording({}, {name: server.facts for name, server in servers.items()}, folder)
    if undrafted is not None:
        recording.facts[UNDRAFTED] = undrafted.facts[TARGET]
    recording.run = _about(options, servers, recording.facts, salt, command)
    record.write_json(folder / record.RUN, recording.run)
    if undrafted is not None:
        _copy_undrafted(undrafted, recording)
    session = Session(options, {n: s for n, s in servers.items() if n not in lost}, recording, salt, progress)
    try:
        for id in chosen:
            _ask(CHECKS[id], session, lost)
    finally:
        verdict = judge(recording)
        verdict["seconds"] = round(time.monotonic() - session.began, 1)
        record.write_json(folder / VERDICT, verdict)
    return verdict


def _ask(check, session, lost):
    """One check's requests; what stops them is recorded for its score."""
    session.begin(check.id)
    note = session.recording.note
    gone = lost.get(TARGET) or session.servers[TARGET].gone
    if gone:
        note(check.id, "stopped", server=TARGET, message=gone)
        return
    try:
        check.ask(session)
        note(check.id, "asked")
    except NotRun as reason:
        # A server that was named and cannot be reached is no server that was not named.
        named = next((lost[name] for name in lost if f"--{name}" in str(reason)), None)
        if named:
            note(check.id, "stopped", server="", message=named)
        else:
            note(check.id, "not run", message=str(reason))
    except ServerGone as gone:
        note(check.id, "stopped", server=gone.server, message=str(gone))


def _servers(options, api_key):
    urls = {
        TARGET: options.url,
        CONTROL: options.control,
        UNDRAFTED: options.undrafted,
        ONE_CHUNK: options.one_chunk,
    }
    common = {"api_key": api_key, "timeout_s": options.timeout_s}
    return {
        name: Server(name, url, model=options.model if name == TARGET else None, **common)
        for name, url in urls.items()
        if url and url.startswith(("http://", "https://"))
    }


def _connect(servers):
    """Reads every server's facts; the message by name of those that cannot be reached."""
    lost = {}
    for name, server in servers.items():
        try:
            server.connect()
        except ServerGone as gone:
            lost[name] = str(gone)
    return lost


def _recorded_undrafted(options):
    """The run on file that stands in for an undrafted server.

    Raises: UsageError where it asked other prompts or its target ran a drafter.
    """
    folder = Path(options.undrafted)
    if not folder.is_dir():
        raise UsageError(f"--undrafted {folder}: neither a URL nor the folder of a run")
    found = record.load(folder)
    theirs = from_json(found.run["options"])
    for name in ("suite", "seed", "max_tokens", "prompts", "template"):
        one, other = getattr(theirs, name), getattr(options, name)
        if one != other:
            raise UsageError(
                f"--undrafted {folder}: that run asked other prompts ({name} {one}, not {other})"
            )
    if found.facts[TARGET].drafter != "":
        raise UsageError(f"--undrafted {folder}: its server ran the drafter {found.facts[TARGET].drafter!r}")
    return found


def _copy_undrafted(theirs, recording):
    """The recorded undrafted answers, as this run's, so that it can be judged again alone."""
    for exchange in theirs.find(DRAFTED, server=TARGET):
        recording.add(replace(exchange, server=UNDRAFTED))


def _about(options, servers, facts, salt, command):
    suite = suite_of(options)
    return {
        "format": record.FORMAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "options": options.as_json(),
        "seed": suite.seed,
        "max_tokens": suite.max_tokens,
        "cache_salt": salt,
        "versions": {**installed_versions(), "python": platform.python_version()},
        "servers": {name: facts_json(found) for name, found in facts.items()},
        "server_info": {name: server.info for name, server in servers.items()},
    }


def judge(recording):
    """The verdict over a recording as plain data, without asking anything."""
    options = from_json(recording.run["options"])
    chosen = selected(options)
    results = {}
    for id in CHECKS:
        if id in options.skip or id in chosen:
            results[id] = _score(CHECKS[id], recording, skipped=id not in chosen)
    statuses = {result.status for result in results.values()} - {SKIPPED}
    verdict = FAIL if FAIL in statuses else PASS if statuses == {PASS} else "incomplete"
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": verdict,
        "exit_code": EXIT_CODES[verdict],
        "seed": recording.run["seed"],
        "suite": options.suite,
        "servers": {name: facts_json(found) for name, found in recording.facts.items()},
        "requests": len(recording.exchanges),
        "checks": {id: result.as_json() for id, result in results.items()},
    }


def _score(check, recording, *, skipped):
    if skipped:
        return Result(check.id, SKIPPED, "left out with --skip")
    not_run, stopped, asked = (recording.event(check.id, kind) for kind in ("not run", "stopped", "asked"))
    if not_run is not None:
        return Result(check.id, NOT_RUN, not_run["message"])
    if stopped is None and asked is None:
        if not recording.find(check.id):
            return Result(check.id, NOT_RUN, "the run ended before it")
        stopped = {"message": "the run ended in the middle of it"}
    result = check.score(recording)
    if stopped is not None and result.status != FAIL:
        summary = stopped["message"] + (f"; until then: {result.summary}" if result.items else "")
        return Result(check.id, ERROR, summary, result.items, result.numbers)
    return result


def rescore(folder):
    """(verdict, the verdict on file or None) of the run in ``folder``, judged again; nothing is written.

    Raises: UsageError when no run is on file there.
    """
    file = Path(folder) / VERDICT
    verdict = judge(record.load(folder))
    try:
        stored = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return verdict, None
    if not isinstance(stored, dict):
        return verdict, None
    verdict["seconds"] = stored.get("seconds")
    return verdict, stored
