"""Where fresh cases start."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from tests.fuzz.processes import CHUNK

VARIABLE = "DYNAFLOW_FUZZ_SEED"


def first_case() -> int:
    """The number of the first case: what the environment says, or one that nobody has run."""
    given = os.environ.get(VARIABLE)
    return int(given) if given else _aligned(os.urandom(4))


def first_case_of_commit() -> int:
    """The same for one commit, so that its tests pass or fail for good, and fresh for the next one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, check=False).stdout.strip()
    if os.environ.get(VARIABLE) or not found:  # not a checkout
        return first_case()
    return _aligned(hashlib.sha256(found).digest()[:4])


def _aligned(drawn: bytes) -> int:
    return int.from_bytes(drawn) // CHUNK * CHUNK
