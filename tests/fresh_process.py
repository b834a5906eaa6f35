"""Code in a new process that has imported torch and nothing else: a fork of one that did so once, in 0.1 s."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from typing import IO

# Reads requests, a line of JSON each, and answers each with the exit status and the output of the code in a fork.
SERVER = """
import json, os, sys, tempfile, traceback
import torch
for line in sys.stdin:
    request = json.loads(line)
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for number in (1, 2):
                    os.dup2(output.fileno(), number)
                os.environ.clear()
                os.environ.update(request["environment"])
                os.chdir(request["folder"])
                sys.argv = ["-c"]
                exec(compile(request["code"], "<code>", "exec"), {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        print(json.dumps([status, output.read()]), flush=True)
"""


@cache
def _server() -> tuple[IO[str], IO[str]]:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.kill)
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def run(code: str) -> str:
    """What the code prints, on both streams. Fails where the code does."""
    ask, answer = _server()
    print(json.dumps({"code": code, "environment": dict(os.environ), "folder": os.getcwd()}), file=ask, flush=True)
    status, output = json.loads(answer.readline())
    assert status == 0, output
    return str(output)
