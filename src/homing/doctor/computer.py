"""Checks of this computer: Python, packages, torch and GPU, SSH, tools, Docker, disk, home directory, .env, clock.

Only `homing image build` needs Docker. After a failed build, the container is kept so that the user can read its log.
"""

from __future__ import annotations

import email.utils
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from homing.cloud.api_key_table import ACCOUNTS
from homing.cloud.home import Home
from homing.cloud.launch.build_image import CONTAINER
from homing.cloud.plan.plan import needs_of
from homing.cloud.plan.timing import checkpoint_bytes
from homing.config.schema.value_types import is_placeholder
from homing.doctor.check import Check, fault, ok, skipped, warning
from homing.doctor.subject import Examined
from homing.pip_command import pip_install
from homing.units import counted, format_bytes, format_duration
from homing.world import HttpRequest, NetworkError, World

__all__ = [
    "check_clock",
    "check_container",
    "check_disk",
    "check_env_file",
    "check_env_values",
    "check_extras",
    "check_home_folder",
    "check_packages",
    "check_python",
    "check_ssh",
    "check_ssh_keys",
    "check_tools",
    "check_torch",
    "clock_warning",
    "compare_clocks",
]

_KEYS = "keys"  # folder in which ssh_access stores the keys
_LEAST_PYTHON = (3, 11)
_LEAST_SSH = (7, 6)  # the oldest OpenSSH that supports all options we use, released in 2017
_LEAST_DISK_BYTES = 2 * 10**9  # free disk space required if no run is specified
_MOST_SKEW_S = 120.0  # maximum clock error without a warning; AWS rejects signatures that are off by five minutes
_CLOCK_S = 10.0
_TORCH_S = 120.0
_TOOL_S = 20.0
_TORCH = """
import json, torch
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "cards": torch.cuda.device_count()}))
"""
# Programs that some commands use: name, version command, purpose, where to get it.
_TOOLS = (
    ("git", ("git", "--version"), "launch --committed-only and for recording homing's commit", "https://git-scm.com"),
    ("docker", ("docker", "--version"), "homing image build", "https://docs.docker.com/get-docker/"),
    ("uv", ("uv", "--version"), "faster environment setup on rented instances", "https://docs.astral.sh/uv/"),
)


def check_python(examined: Examined) -> list[Check]:
    found = examined.facts.get("python")
    if not found:
        python = examined.home.world.python()
        return [fault("python.version", f"{python} does not start.", "Reinstall homing: python3 -m venv .venv")]
    version = ".".join(map(str, found))
    if tuple(found) < _LEAST_PYTHON:
        least = ".".join(map(str, _LEAST_PYTHON))
        fix = f"Install Python {least} or newer and create a new environment: python{least} -m venv .venv"
        return [fault("python.version", f"Python {version} is too old.", fix, "https://www.python.org/downloads/")]
    return [ok("python.version", f"Python {version}.")]


def check_packages(examined: Examined) -> list[Check]:
    """Check the packages that every command needs."""
    core = [each for each in examined.facts.get("packages", []) if not each["extra"]]
    bad = [problem for each in core if (problem := _package_problem(each))]
    if bad:
        return [fault("packages.core", " ".join(bad), pip_install("", "--upgrade", "--force-reinstall"))]
    return [ok("packages.core", f"{counted(len(core), 'package')}, all in the supported range.")]


def check_extras(examined: Examined) -> list[Check]:
    """Check that the needed extras are installed and that the packages of all extras have supported versions."""
    packages = [each for each in examined.facts.get("packages", []) if each["extra"] in _EXTRAS]
    found = []
    for extra in _EXTRAS:
        of_it = [each for each in packages if each["extra"] == extra]
        absent = [each["name"] for each in of_it if not each["version"]]
        bad = [problem for each in of_it if each["version"] and (problem := _package_problem(each))]
        install = pip_install(extra, "--upgrade")
        if bad or (absent and extra in examined.extras):
            text = " ".join([*bad, *([f"Not installed: {', '.join(absent)}."] if absent else [])])
            found.append(fault(f"packages.{extra}", text, install))
        elif absent:
            found.append(skipped(f"packages.{extra}", f"Not installed: {', '.join(absent)}.", install))
        elif of_it:
            found.append(ok(f"packages.{extra}", f"{counted(len(of_it), 'package')}, all in the supported range."))
    return found


_EXTRAS = ("lm", "aws", "hub", "modal", "parquet", "trackers")


def check_torch(examined: Examined) -> list[Check]:
    """Check that torch loads and sees every GPU that the driver sees. `packages.lm` checks torch's version."""
    versions = {each["name"]: each["version"] for each in examined.facts.get("packages", [])}
    if not versions.get("torch"):
        return [skipped("torch.loads", "torch is not installed.", pip_install("lm"))]
    world = examined.home.world
    done = world.run([world.python(), "-c", _TORCH], timeout_s=_TORCH_S)
    try:
        torch = json.loads(done.out)
    except ValueError:
        why = (done.err.strip().splitlines() or ["no output"])[-1]
        fix = pip_install("lm", "--force-reinstall")
        return [fault("torch.loads", f"torch fails to load: {why}", fix, "https://pytorch.org/get-started/locally/")]
    found = [ok("torch.loads", f"torch {torch['version']}.")]
    driver = world.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], timeout_s=_TOOL_S)
    num_cards = len(driver.out.strip().splitlines()) if driver.code == 0 else 0
    if num_cards and torch["cards"] < num_cards:
        built = f"for CUDA {torch['cuda']}" if torch["cuda"] else "without CUDA"
        text = (
            f"The driver shows {counted(num_cards, 'GPU')}, but torch sees {torch['cards']}; torch was built {built}."
        )
        page = "https://pytorch.org/get-started/locally/"
        return [*found, fault("torch.cuda", text, "Install a torch build that matches the driver (nvidia-smi).", page)]
    return [
        *found,
        ok(
            "torch.cuda",
            f"{counted(num_cards, 'GPU')}, visible to the driver and to torch."
            if num_cards
            else "No GPU on this computer.",
        ),
    ]


def check_ssh(examined: Examined) -> list[Check]:
    world, page = examined.home.world, "https://www.openssh.com/portable.html"
    install = "Install the OpenSSH client: apt install openssh-client, dnf install openssh-clients"
    client = world.run(["ssh", "-V"], timeout_s=_TOOL_S)
    version = re.search(r"OpenSSH_(?:for_Windows_)?(\d+)\.(\d+)", client.err + client.out)
    found = []
    if client.code == 127 or version is None:
        found.append(fault("ssh.client", "The OpenSSH client is not installed.", install, page))
    elif (int(version[1]), int(version[2])) < _LEAST_SSH:
        text = f"OpenSSH {version[1]}.{version[2]} is older than {_LEAST_SSH[0]}.{_LEAST_SSH[1]}."
        found.append(fault("ssh.client", text, install, page))
    else:
        found.append(ok("ssh.client", f"OpenSSH {version[1]}.{version[2]}."))
    # Pass the path of a missing key, so that ssh-keygen just fails. Without arguments it would prompt for a file name.
    keygen = world.run(["ssh-keygen", "-l", "-f", str(examined.home.path / "no-such-key")], timeout_s=_TOOL_S)
    if keygen.code == 127:
        return [
            *found,
            fault("ssh.keygen", "ssh-keygen is not installed: homing cannot create keys for instances.", install, page),
        ]
    return [*found, ok("ssh.keygen", "ssh-keygen is installed.")]


def check_ssh_keys(examined: Examined) -> list[Check]:
    """Check that only the owner can read the private keys, because ssh rejects keys that other users can read."""
    world, folder = examined.home.world, examined.home.path / _KEYS
    if not world.exists(folder):
        return [skipped("ssh.keys", "There is no SSH key yet. The first launch on a rented instance creates one.")]
    private = [folder / name for name in world.walk(folder) if name.endswith("/key")]
    loose = [path for path in private if world.mode(path) & 0o077]
    halves = [path for path in private if not world.exists(f"{path}.pub")]
    if loose:
        names = " ".join(str(path) for path in loose)
        return [fault("ssh.keys", f"Other users of this computer can read {names}.", f"chmod 600 {names}")]
    if halves:
        fix = (
            f"Move {halves[0].parent} away; the next launch creates a new key."
            " Instances created with the old key still need it."
        )
        return [fault("ssh.keys", f"{halves[0]} has no public key.", fix)]
    return [ok("ssh.keys", f"{counted(len(private), 'key')}, readable only by you.")]


def check_tools(examined: Examined) -> list[Check]:
    found = []
    for name, argv, purpose, page in _TOOLS:
        done = examined.home.world.run(list(argv), timeout_s=_TOOL_S)
        version = (done.out or done.err).strip().splitlines()
        if done.code or not version:
            found.append(
                skipped(f"tools.{name}", f"{name} is not installed. It is needed for {purpose}.", f"See {page}", page)
            )
        else:
            found.append(ok(f"tools.{name}", f"{version[0]}."))
    return found


def check_home_folder(examined: Examined) -> list[Check]:
    path = examined.home.path
    there = _nearest(path, examined)
    if not examined.home.world.may_write(there):
        fix = f"Become its owner (chown), or use another home directory: export HOMING_HOME={Path.home() / '.homing'}"
        return [fault("home.writable", f"homing cannot write to {there}. Its home directory is {path}.", fix)]
    return [ok("home.writable", f"{path} is writable.")]


def check_disk(examined: Examined) -> list[Check]:
    there = _nearest(examined.home.path, examined)
    free = examined.home.world.free_bytes(there)
    needed, what = _LEAST_DISK_BYTES, "a fetched model may need"
    if examined.run is not None:
        is_here = "local" in examined.providers
        needed = needs_of(examined.run).disk_bytes if is_here else checkpoint_bytes(examined.run)
        what = f"{'training' if is_here else 'fetching'} {examined.run.name} needs"
    if free < needed:
        text = f"{format_bytes(free)} free at {there}; {what} {format_bytes(needed)}."
        return [fault("disk.free", text, "Free space, or use another home directory: export HOMING_HOME=/elsewhere")]
    return [ok("disk.free", f"{format_bytes(free)} free at {there}.")]


def check_env_file(examined: Examined) -> list[Check]:
    path = examined.folder / ".env"
    if not examined.home.world.exists(path):
        return [skipped("env.file", f"There is no {path}; exported variables work too.")]
    if examined.home.world.mode(path) & 0o077:
        return [fault("env.file", f"{path} is readable by other users and may contain keys.", f"chmod 600 {path}")]
    return [ok("env.file", f"{path} is readable only by you.")]


def check_env_values(examined: Examined) -> list[Check]:
    """Find environment variables with values that cannot be keys: placeholders, and keys with quotes or spaces."""
    env, found = examined.home.world.environment(), []
    for account in ACCOUNTS.values():
        for name in account.keys:
            value = env.get(name, "")
            fix = f"export {name}=...   with a key from {account.key_page}"
            if value and (is_placeholder(value) or re.fullmatch(r"(?i)(your|my)[-_ ].*|x{3,}|\.{3}", value)):
                found.append(
                    fault(f"{account.name}.placeholder", f"{name} is set to a placeholder.", fix, account.key_page)
                )
            elif value != value.strip(" \t\r\n'\""):
                text = f"{name} has spaces or quotes around its value."
                found.append(fault(f"{account.name}.placeholder", text, fix, account.key_page))
    num_set = sum(bool(env.get(name)) for account in ACCOUNTS.values() for name in account.keys)
    return found or [ok("env.values", f"{num_set} keys are set in the environment; none is a placeholder.")]


def check_clock(examined: Examined) -> list[Check]:
    """Compare this computer's clock with the Date headers of the providers' responses, requested in parallel.

    If the clock is wrong, providers reject signed requests.
    """
    world, env = examined.home.world, examined.home.world.environment()
    urls = [url for name in examined.providers if (url := _api_url(name, env))]
    urls += [env["HOMING_FAKE_URL"]] if env.get("HOMING_FAKE_URL") else []
    return compare_clocks(world, urls)


def clock_warning(home: Home, provider: str) -> str:
    """Return a warning if this computer's clock differs too much from the provider's, or ""."""
    url = _api_url(provider, home.world.environment())
    if not url:
        return ""  # this provider has no clock to compare with
    found = compare_clocks(home.world, [url])
    return " ".join(f"{each.text} {each.fix}" for each in found if each.is_finding)


def _api_url(provider: str, env: Mapping[str, str]) -> str:
    account = ACCOUNTS.get(provider)
    return "" if account is None or not account.url else env.get(account.url_env) or account.url


def compare_clocks(world: World, urls: list[str]) -> list[Check]:
    """Compare this computer's clock with the Date header of the first URL that reports one."""
    calls = [lambda url=url: world.http(HttpRequest("GET", url, timeout_s=_CLOCK_S)) for url in urls]
    for url, reply in zip(urls, world.together(calls, _CLOCK_S), strict=True):
        if isinstance(reply, (NetworkError, TimeoutError)):
            continue  # not reported here, because the check of the provider's key reports it
        if isinstance(reply, Exception):
            raise reply
        if not reply.headers.get("date"):
            continue
        date = email.utils.parsedate_to_datetime(reply.headers["date"]).timestamp()
        skew_s = world.now() - date
        if abs(skew_s) > _MOST_SKEW_S:
            side = "ahead of" if skew_s > 0 else "behind"
            text = f"This computer's clock is {format_duration(abs(skew_s))} {side} {url}."
            return [fault("clock.skew", text, "Sync it over the network: timedatectl set-ntp true   (macOS: sntp -sS)")]
        return [ok("clock.skew", f"This computer's clock is within {max(1.0, abs(skew_s)):.0f} s of {url}.")]
    return [skipped("clock.skew", "No provider that was queried reports its time.")]


def _package_problem(package: dict[str, Any]) -> str:
    name, version = package["name"], package["version"]
    if not version:
        return f"{name} is not installed."
    for sign, bound in re.findall(r"(>=|<=|==|~=|<|>)\s*([0-9][0-9.]*)", package["bounds"]):
        if not _holds(_numbers(version), sign, _numbers(bound)):
            return f"{name} is {version}, but {package['bounds']} is required."
    return ""


def _holds(version: tuple[int, ...], sign: str, bound: tuple[int, ...]) -> bool:
    width = max(len(version), len(bound))
    left, right = (each + (0,) * (width - len(each)) for each in (version, bound))
    if sign == "<":
        return left < right
    return left <= right if sign == "<=" else left > right if sign == ">" else left >= right


def _numbers(version: str) -> tuple[int, ...]:
    """Parse the leading numbers of a version: 2.13.0+cpu -> 2, 13, 0. The rest does not matter for a version range."""
    plain = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(part) for part in plain[0].split(".")) if plain else ()


def _nearest(path: Path, examined: Examined) -> Path:
    """Return the folder, or its nearest existing parent if it does not exist yet."""
    while not examined.home.world.exists(path) and path != path.parent:
        path = path.parent
    return path


_ASK_S = 20.0
_PAGE = "docs/guides/image.md"
_STATUS = ["docker", "ps", "--all", "--filter", f"name=^{CONTAINER}$", "--format", "{{.Status}}"]


def check_container(examined: Examined) -> list[Check]:
    world = examined.home.world
    if world.run(["docker", "--version"], timeout_s=_ASK_S).code:
        return [skipped("container.engine", "Docker is not installed; only `homing image build` needs it.", page=_PAGE)]
    shown = world.run(_STATUS, timeout_s=_ASK_S)
    if shown.code:
        said = (shown.err.strip().splitlines() or ["no answer"])[-1]
        fix = "sudo systemctl start docker   or, to get permission: sudo usermod -aG docker $USER, and log in again"
        return [skipped("container.engine", f"Cannot reach the Docker engine: {said}", fix, _PAGE)]
    status = shown.out.strip()
    if status.startswith("Exited") and not status.startswith("Exited (0)"):
        text = f"The container `{CONTAINER}` failed: {status}."
        fix = (
            f"Read its log: docker logs {CONTAINER}   Try it: docker run -it IMAGE bash   Retry: homing image build RUN"
        )
        return [warning("container.training", text, fix, _PAGE)]
    return [ok("container.engine", f"The Docker engine is running; `{CONTAINER}` is {status.lower() or 'absent'}.")]
