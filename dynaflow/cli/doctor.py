"""`dynaflow doctor`: what this machine has, what will work, and what to install."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
import typer
from rich.text import Text

from dynaflow.cli import arguments
from dynaflow.cli.output import Folded, listed, out, print_json, show, table
from dynaflow.core import disk_cache
from dynaflow.core.plan import Lane
from dynaflow.runtime import sm_partitions

EXAMPLE = "dynaflow doctor"
OLDEST, NEWEST = (2, 11), (2, 13)
"""Versions of torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    ok: bool
    found: str
    serves: str
    """What needs it."""
    advice: str = ""
    """What to do if it is missing."""
    essential: bool = False


def add(app: typer.Typer) -> None:
    app.command(epilog=f"Example: {EXAMPLE}")(doctor)


def doctor(as_json: arguments.Json = False) -> None:
    """Shows what this machine has, what will work, and what to install.

    Exit code 1 if something essential is missing.
    """
    checks = list(examine())
    ready = all(check.ok for check in checks if check.essential)
    if as_json:
        print_json({"ready": ready, "checks": [asdict(check) for check in checks]})
    else:
        rows = table("", "", "here", "for", folds=("here", "for"))
        for check in checks:
            style = "green" if check.ok else "red" if check.essential else ""
            state = Text("ok" if check.ok else "missing", style=style)
            rows.add_row(state, check.name, Folded(check.found), Folded(check.serves))
        show(rows)
        if missing := [(check.name, check.advice) for check in checks if not check.ok]:
            out.print("\nwhat to do about what is missing", style="bold")
            listed(missing)
        out.print("\nready" if ready else "\nnot ready: see what is missing above", style="bold")
    if not ready:
        raise typer.Exit(1)


def examine() -> Iterator[Check]:
    yield Check(
        name="Python", ok=sys.version_info >= (3, 11), found=platform.python_version(), serves="everything",
        advice="install Python 3.11 or newer", essential=True,
    )  # fmt: skip
    yield _torch()
    yield cpp_compiler()
    yield from _cuda()
    yield from _collectives()
    for package, serves, advice in (
        ("transformers", "models by name, config folders", "pip install 'dynaflow[demo]'"),
        ("ortools", "the strategy `solver`", "pip install 'dynaflow[tune]'"),
        ("vllm", "the vLLM plugin", "pip install vllm, in an environment of its own; see docs/integrations.md"),
    ):
        found = _version(package)
        yield Check(name=package, ok=bool(found), found=found or "not installed", serves=serves, advice=advice)
    yield disk_cache_check()


def _torch() -> Check:
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    fits = numbers is not None and OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST
    oldest, newest = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
    return Check(
        name="torch", ok=fits, found=torch.__version__, serves="everything", essential=True,
        advice=f"install torch {oldest} to {newest}",
    )  # fmt: skip


def cpp_compiler() -> Check:
    own = os.environ.get("CXX")
    found = shutil.which(own or ("clang++" if sys.platform == "darwin" else "g++"))  # where Inductor looks
    return Check(
        name="C++ compiler", ok=found is not None, found=found or (f"none at CXX={own}" if own else "none"),
        serves='operators="inductor", the default', essential=True,
        advice='install g++, or set CXX to another C++ compiler; operators="eager" needs none',
    )  # fmt: skip


def _cuda() -> Iterator[Check]:
    """Checks the GPU. None is needed: lanes are threads on a CPU."""
    here = torch.cuda.is_available()
    why = "torch sees none" if torch.version.cuda else "this torch is built without CUDA"
    name = f"{torch.cuda.get_device_name()}, {_sms()} SMs, CUDA {torch.version.cuda}" if here else why
    advice = "none is needed: lanes are threads then; for one, install its driver and a torch built for CUDA"
    yield Check(name="GPU", ok=here, found=name, serves="lanes as streams", advice=advice)
    if not here:
        return
    graphs, problem = _tried(_capture)
    yield Check(name="CUDA graphs", ok=graphs, found=problem or "captured one", serves='cudagraph="plan"',
                advice="look at the error; cudagraph=None works without")  # fmt: skip
    shares, problem = _tried(_divide)
    yield Check(name="green contexts", ok=shares, found=problem or "the device can be divided",
                serves="lanes with a share: sms=",
                advice="install a driver newer than CUDA 12.4; plans without sms= work as it is")  # fmt: skip
    triton = _version("triton")
    yield Check(name="triton", ok=bool(triton), found=triton or "not installed",
                serves='operators="inductor" on a GPU', advice="pip install triton", essential=True)  # fmt: skip


def _sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def _tried(test: object) -> tuple[bool, str]:
    try:
        test()  # type: ignore[operator]
    except Exception as e:
        return False, str(e).splitlines()[0]
    return True, ""


def _capture() -> None:
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    graph.replay()
    torch.cuda.synchronize()


def _divide() -> None:
    sm_partitions.for_lanes(0, (Lane(name="some", sms=8), Lane(name="rest")))


def _collectives() -> Iterator[Check]:
    here = torch.distributed.is_available()
    gloo, nccl = (here and getattr(torch.distributed, f"is_{name}_available")() for name in ("gloo", "nccl"))
    for name, found, serves in (("gloo", gloo, "several ranks on CPUs"), ("nccl", nccl, "several ranks on GPUs")):
        yield Check(name=name, ok=found, found="in torch" if found else "not in this torch", serves=serves,
                    advice="install a torch that has it")  # fmt: skip


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def disk_cache_check() -> Check:
    serves, advice = "plans and tuned choices stored for the next process", "DYNAFLOW_CACHE_DIR names another folder"
    if not disk_cache.enabled():
        return Check(name="cache", ok=False, found="off", serves=serves, advice="unset DYNAFLOW_CACHE")
    folder = disk_cache.default_root()
    try:
        disk_cache.make_private(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        return Check(name="cache", ok=False, found=f"{folder}: {e.strerror or e}", serves=serves, advice=advice)
    return Check(name="cache", ok=True, found=str(folder), serves=serves)
