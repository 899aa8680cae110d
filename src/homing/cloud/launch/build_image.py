"""Builds a container image with everything that training needs, so that a rented machine installs nothing.

    write_context   Dockerfile, versions, wheel -> a folder from which Docker on any machine can build
    build           docker build -> test it in a container named `training` -> docker push to the user's registry

The package versions are those that a launch from this computer sends. The environment in the image is created by the
same bootstrap that sets up a bare machine, and has the same fingerprint, so a launch with the same versions uses it
unchanged. The build runs the user's own Docker with the user's own login, so homing never sees the password.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from homing.cloud.launch.run_documents import LOCK, make_bootstrap_spec
from homing.cloud.machine_setup import boot_files as booting
from homing.cloud.machine_setup import startup_script
from homing.cloud.providers.base import Offer
from homing.config.schema.value_types import is_placeholder
from homing.errors import HomingError, ProviderRefused, UsageError
from homing.wire import codec, file_names
from homing.wire.boot_json import Boot, EndBilling
from homing.wire.run_json import Run
from homing.world import World

__all__ = ["BASE", "CONTAINER", "Built", "Context", "build", "check_name", "write_context"]

# The image uses this computer's Python version, because the package versions were tested with it.
BASE = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim-bookworm"
CONTAINER = "training"
LOG = "docker.log"  # a file with Docker's output, next to the Dockerfile
_DIR = f"{startup_script.ROOT}/image"
_BUILD_S, _PUSH_S, _TRY_S, _ASK_S = 7200.0, 7200.0, 600.0, 30.0
_POLL_S = 0.2
_LABEL = "homing.try"
# Matches host/path:tag, as Docker accepts it, but no digest, because an image cannot be pushed to a digest.
_NAME = re.compile(r"([\w.-]+(:\d+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:[\w][\w.-]{0,127})?")
_TOOLS = ("bash", "curl", "flock", "gcc", "sshd")  # Triton needs gcc to compile C code before its first kernel
_DOCKERFILE = """\
# {name}: written by `homing image build`; the versions are those of {lock}.
FROM {base}
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1 \\
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
LABEL homing.lock={digest}
RUN {{ {tools}; }} >/dev/null || {{ apt-get update -qq && apt-get install -y -qq --no-install-recommends \\
    bash ca-certificates curl gcc libc6-dev openssh-server util-linux && rm -rf /var/lib/apt/lists/*; }}
COPY {lock} {dir}/
RUN python3 -m pip install --require-hashes --only-binary :all: -r {dir}/{lock}
COPY {files} {dir}/
RUN {make_bootstrap_spec} || {{ cat {dir}/run/{outcome}; exit 1; }}; rm -rf {dir}
CMD ["sleep", "infinity"]
"""
_TRY = f"""\
for tool in {" ".join(_TOOLS)}; do command -v $tool >/dev/null || {{ echo "the image has no $tool"; exit 1; }}; done
exec {startup_script.CACHE_DIR}/env-*/bin/python -c '
import numpy, safetensors, tokenizers, torch
print("torch", torch.__version__, "numpy", numpy.__version__)'
"""


@dataclass(frozen=True)
class Context:
    """A Docker build context, from which Docker on any machine can build the image."""

    folder: Path
    base: str
    lock_sha256: str
    num_packages: int


@dataclass(frozen=True)
class Built:
    image: str
    id: str
    says: str  # last line of output of the container that tested the image
    digest: str = ""  # digest of the pushed image, or "" if none was pushed

    @property
    def pinned(self) -> str:
        """The image's name with its digest, so that a later push to the same tag does not affect runs."""
        folder, slash, name = self.image.rpartition("/")
        return f"{folder}{slash}{name.partition(':')[0]}@{self.digest}"


def check_name(image: str) -> str:
    if not _NAME.fullmatch(image) or is_placeholder(image):
        raise UsageError(
            what=f"Invalid image name: {image!r}.",
            why="Use a lowercase name in your own registry, such as me/train:1 or ghcr.io/me/train:1.",
            fix="For example: homing image build RUN --push me/train:1",
        )
    return image


def write_context(run: Run, folder: Path, world: World, *, base: str) -> Context:
    """Write the Dockerfile and all files that it copies. The context contains neither secrets nor training data."""
    boot, files = _bootstrap_files(run, world)
    digest = hashlib.sha256(files[LOCK]).hexdigest()
    text = _DOCKERFILE.format(
        name=run.name,
        base=base,
        lock=LOCK,
        digest=digest,
        dir=_DIR,
        tools=" && ".join(f"command -v {tool}" for tool in _TOOLS),
        files=" ".join(sorted(name for name in (*files, file_names.BOOT) if name != LOCK)),
        make_bootstrap_spec=shlex.join(boot.bootstrap_argv),
        outcome=file_names.OUTCOME,
    )
    world.mkdir(folder)
    for name, data in {
        **files,
        file_names.BOOT: codec.dumps(boot, indent=1).encode(),
        "Dockerfile": text.encode(),
    }.items():
        world.write(folder / name, data)
    return Context(folder, base, digest, len(files[LOCK].splitlines()))


def build(
    context: Context, image: str, world: World, *, is_pushed: bool, notify: Callable[[str], None] = lambda text: None
) -> Built:
    """Build the image, test it in a container and push it. The first failure raises an error with Docker's message."""
    docker = _Docker(context.folder, world, notify)
    docker.check_engine()
    notify(f"Building {image} from {context.base}; torch alone takes several GB")
    # Rented machines are amd64, even if this computer is not.
    code, said = docker.call(["build", "--platform", "linux/amd64", "-t", image, "."], _BUILD_S)
    if code:
        raise _failed(HomingError, f"Could not build {image}.", said, f"docker build -t {image} {context.folder}")
    id_ = world.run(["docker", "image", "inspect", "--format", "{{.Id}}", image], _ASK_S).out.strip()
    built = Built(image, id_, _try_out(docker, image, notify))
    if not is_pushed:
        return built
    notify(f"Pushing {image}")
    code, said = docker.call(["push", image], _PUSH_S)
    if code:
        fix = f"docker login {_registry(image)}".rstrip() + f"   then: docker push {image}"
        raise _failed(ProviderRefused, f"Could not push {image}; nothing was rented.", said, fix)
    digest = re.search(r"digest: (sha256:[0-9a-f]{64})", said)
    return dataclasses.replace(built, digest=digest[1] if digest else "")


def _bootstrap_files(run: Run, world: World) -> tuple[Boot, dict[str, bytes]]:
    """Return boot.json and the files that set up a bare machine, without run-specific settings (disk, volume, GPU)."""
    end = EndBilling(kind="command", argv=["true"])
    place = dataclasses.replace(startup_script.place(end), work_dir=_DIR)
    # Others may pull the image, so it must not reveal names and paths that the user chose.
    plain = dataclasses.replace(run, id="image", name="image", cloud=dataclasses.replace(run.cloud, volume=""))
    boot = booting.make_boot(
        plain,
        mark="image",
        attempt=1,
        work_dir=_DIR,
        inputs=[],
        python=place.python,
        end_billing=end,
        started_at=0.0,
        rate_usd_per_hour=Decimal(0),
        spend_limit_usd=None,
    )
    nothing = Offer("image", "image", "CPU", 0, 1, 0, Decimal(0))
    boot, files = make_bootstrap_spec(boot, place, plain, nothing, world, is_stand_in=True)
    assert boot.bootstrap is not None, "a place with a cache has a bootstrap spec"
    return dataclasses.replace(boot, store="", bootstrap=dataclasses.replace(boot.bootstrap, disk_bytes=0)), files


class _Docker:
    """Runs the user's own docker, shows its output as it arrives, and logs it in the folder."""

    def __init__(self, folder: Path, world: World, notify: Callable[[str], None]) -> None:
        self._folder, self._world, self._notify = folder, world, notify

    def check_engine(self) -> None:
        done = self._world.run(["docker", "version", "--format", "{{.Server.Version}}"], _ASK_S)
        if done.code:
            raise UsageError(
                what="Docker is not installed." if done.code == 127 else "The Docker engine is not running.",
                why=(done.err or done.out).strip(),
                fix="Install or start Docker: https://docs.docker.com/get-docker"
                "   or write only the build folder: --no-docker",
            )

    def call(self, words: list[str], timeout_s: float) -> tuple[int, str]:
        """Run docker, and return its exit code (124 on timeout) and its output."""
        world, log = self._world, self._folder / LOG
        start = world.size(log) if world.exists(log) else 0
        deadline, shown = world.monotonic() + timeout_s, start
        pid = world.spawn(["docker", *words], world.environment(), self._folder, log)
        try:
            while (code := world.poll(pid)) is None and world.monotonic() < deadline:
                shown = self._show_new(shown)
                world.sleep(_POLL_S)
        except BaseException:  # docker runs in its own session, where Ctrl-C does not reach it, so stop it here
            world.signal(pid, signal.SIGTERM, is_group=True)
            raise
        if code is None:
            world.signal(pid, signal.SIGTERM, is_group=True)
        self._show_new(shown)
        said = world.read(log, start).decode("utf-8", "replace")
        return (124, f"{said}\nTimed out after {timeout_s:g} s.") if code is None else (code, said)

    def _show_new(self, start: int) -> int:
        data = self._world.read(self._folder / LOG, start)
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.decode("utf-8", "replace").splitlines():
            self._notify(f"  {line}")
        return start + len(whole)

    def forget(self) -> None:
        """Remove a container left behind by an earlier test, but never someone else's container with that name."""
        argv = ["docker", "ps", "-aq", "--filter", f"name=^{CONTAINER}$", "--filter", f"label={_LABEL}"]
        for name in self._world.run(argv, _ASK_S).out.split():
            self._world.run(["docker", "rm", "-f", name], _ASK_S)


def _try_out(docker: _Docker, image: str, notify: Callable[[str], None]) -> str:
    """Run the image's test in a container and return the last line of its output. If it fails, keep the container."""
    docker.forget()
    notify(f"Testing {image} in a container named {CONTAINER}")
    words = ["run", "--name", CONTAINER, "--label", _LABEL, "--network", "none", image, "sh", "-c", _TRY]
    code, said = docker.call(words, _TRY_S)
    if code:
        fix = f"docker logs {CONTAINER}   or look inside: docker run -it {image} bash"
        raise _failed(HomingError, f"The image {image} failed its test.", said, fix)
    docker.forget()
    return (said.strip().splitlines() or [""])[-1]


def _registry(image: str) -> str:
    """Return the registry to pass to `docker login`, or "" for Docker Hub."""
    first, slash, _ = image.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else ""


def _failed(kind: type[HomingError], what: str, said: str, fix: str) -> HomingError:
    lines = [line for line in said.strip().splitlines() if line.strip()]
    return kind(what=what, why="\n".join(lines[-5:]) or "Docker printed nothing.", fix=fix)
