"""Four clouds that each take two seconds to answer, asked at once; then one of them is dead.

    python benchmarks/offers.py [--delay 2.0] [--quick]

The four adapters ask their doubles through proxies that hold the first connection back. Passes when all offers are
there in under 3.5 s (with --quick: in at most that much more than without the delay, for a machine that is busy), and
when the death of one is reported and costs no other's offer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]

from tests.doubles import modal as modal_double  # noqa: E402
from tests.doubles import runpod_server, shadeform  # noqa: E402
from tests.doubles.aws_server import aws_cloud  # noqa: E402
from tests.doubles.proxy import Proxy  # noqa: E402
from tests.doubles.runpod_server import RunpodServer  # noqa: E402
from tests.doubles.shadeform_server import ShadeformServer  # noqa: E402

from _result import write_proof  # noqa: E402

MOST_S = 3.5
CLOUDS = {
    "aws": "AWS_ENDPOINT_URL",
    "modal": "MODAL_SERVER_URL",
    "runpod": "RUNPOD_API_URL",
    "shadeform": "HOMING_SHADEFORM_URL",
}
# What `homing offers` does between being understood and having its table; start-up and imports are not measured.
ASK = """
import json, sys, time
from pathlib import Path
import boto3, modal
from homing.cloud.home import Home
from homing.cloud.plan.offers import list_offers
from homing.cloud.providers.base import Needs
from homing.world import World
home = Home(Path(sys.argv[1]), World())
for name in sys.argv[2:]: home.provider(name)
began = time.monotonic()
found = list_offers(Needs(num_gpus=0), sys.argv[2:], home)
took = time.monotonic() - began
counts = {name: sum(o.provider == name for o in found.offers) for name in sys.argv[2:]}
print(json.dumps({"seconds": took, "offers": counts, "problems": found.problems}), flush=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=2.0, help="seconds that each takes to answer")
    parser.add_argument("--quick", action="store_true", help="judged against no delay; nothing is kept")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, clouds(Path(folder)) as (proxies, environment):
        plain = ask(Path(folder), environment)
        for proxy in proxies.values():
            proxy.waits_s = [arguments.delay]
        slow = ask(Path(folder), environment)
        dead = ask(Path(folder), {**environment, CLOUDS["runpod"]: "http://127.0.0.1:9"})
    figures: dict[str, Any] = {
        "delay_s": arguments.delay,
        "seconds": round(slow["seconds"], 2),
        "seconds_without_delay": round(plain["seconds"], 2),
        "offers": slow["offers"],
        "offers_with_one_dead": dead["offers"],
        "reported": dead["problems"],
    }
    for name, value in figures.items():
        print(f"{name:<22} {value}")
    allowed = MOST_S + (plain["seconds"] if arguments.quick else 0.0)
    others = [name for name in CLOUDS if name != "runpod"]
    passed = (
        arguments.delay <= slow["seconds"] < allowed
        and all(slow["offers"].values())
        and slow["problems"] == []
        and all(dead["offers"][name] == slow["offers"][name] for name in others)
        and len(dead["problems"]) == 1
        and "runpod" in dead["problems"][0]
    )
    if not arguments.quick:
        write_proof("offers", figures, passed=passed)
    print(f"{'PASS' if passed else 'FAIL'} {len(CLOUDS)} clouds in {slow['seconds']:.2f} s, one dead reported")
    return 0 if passed else 1


def ask(folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment}
    argv = [sys.executable, "-c", ASK, str(folder / "home"), *CLOUDS]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"FAIL {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextlib.contextmanager
def clouds(folder: Path) -> Iterator[tuple[dict[str, Proxy], dict[str, str]]]:
    """The four doubles, each behind a proxy, and the environment that leads there."""
    keys = {
        "AWS_ACCESS_KEY_ID": "AKIATEST",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "RUNPOD_API_KEY": runpod_server.KEY,
        "SHADEFORM_API_KEY": shadeform.KEY,
    }
    with contextlib.ExitStack() as stack:
        modal = stack.enter_context(modal_double.running(folder / "modal"))
        urls = {
            "aws": stack.enter_context(aws_cloud(folder / "aws")).url,
            "modal": modal.url,
            "runpod": stack.enter_context(RunpodServer(folder / "runpod")).url,
            "shadeform": stack.enter_context(ShadeformServer(folder / "shadeform")).url,
        }
        proxies = {name: stack.enter_context(Proxy(urlsplit(url).port or 0)) for name, url in urls.items()}
        through = {
            CLOUDS[name]: f"{proxies[name].endpoint}{urlsplit(url).path}".rstrip("/") for name, url in urls.items()
        }
        yield proxies, {**keys, **modal.environment, **through}


if __name__ == "__main__":
    sys.exit(main())
