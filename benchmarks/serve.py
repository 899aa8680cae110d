"""`homing serve` on a CPU: throughput of many clients, equality of batched texts, and what hostile clients can do.

    python benchmarks/serve.py            64 clients; 60 s of long prompts, disconnects and 50 clients
    python benchmarks/serve.py --quick    16 clients; 5 s; no figures kept

The server runs in a process of its own, as `homing serve` starts it, with a model of the size of the preset `tiny` and
untrained weights: the time of a step does not depend on them. Clients run in another process.

    throughput   generated tokens per second of one client, and of all at once, streamed and not
    equality     greedy texts of all clients at once, compared with `generate` for each prompt alone
    hostile      clients that send prompts of 3.9 MB, clients that leave in the middle of a stream, and clients that
                 behave; /health is asked every 50 ms, and the server's memory is read before and after
    schemas      the time between two tokens of clients that stream plain texts, alone and next to clients whose JSON
                 schema is expensive at each token
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "benchmarks")]

import httpx  # noqa: E402
from tests.cli.trained import make_checkpoint  # noqa: E402
from tests.lm.tiny import make_data, make_run  # noqa: E402

from _result import write_result  # noqa: E402
from homing.lm.generate import generate, load_for_use  # noqa: E402
from homing.sampling_settings import SamplingSettings  # noqa: E402

TOKEN = "a-token-for-a-benchmark"
TOKENS = 80  # per text
LEAST_RATIO = 4.0
MOST_HEALTH_S = 0.5
MOST_GROWTH_MB = 300
MOST_DELAY = 2.0  # by expensive schemas, of the 99th percentile of the time between two tokens
LONG_PROMPT_BYTES = 3_900_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 clients and 5 seconds; nothing is kept")
    arguments = parser.parse_args()
    num_clients, seconds = (16, 5.0) if arguments.quick else (64, 60.0)
    with tempfile.TemporaryDirectory(prefix="homing-serve-") as folder:
        model = make_model(Path(folder))
        with serving(model) as server:
            figures: dict[str, Any] = {"clients": num_clients, "tokens_per_text": TOKENS}
            figures |= in_another_process(throughput, server.url, num_clients)
            figures["equal_texts"] = equality(server.url, model, num_clients)
            figures |= hostile(server, seconds)
        with serving(make_model(Path(folder) / "chat", phase="sft")) as server:
            figures |= in_another_process(schemas, server.url, max(5.0, seconds / 4))
    for name, value in figures.items():
        print(f"{name:28} {value}")
    checks = {
        "ratio": figures["ratio"] >= LEAST_RATIO,
        "equal texts": figures["equal_texts"] == num_clients,
        "no errors": figures["errors"] == 0,
        "health": figures["health_max_s"] <= MOST_HEALTH_S,
        "memory": figures["growth_mb"] <= MOST_GROWTH_MB,
        "schemas": figures["schemas_delay"] <= MOST_DELAY,
    }
    failed = [name for name, is_met in checks.items() if not is_met]
    if not arguments.quick:
        write_result("serve", figures, passed=not failed)
    print(f"FAIL: {', '.join(failed)}" if failed else "PASS")
    return 1 if failed else 0


# -- the server --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Server:
    url: str
    pid: int

    def memory_mb(self) -> float:
        """Return the resident memory of the server's process."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1000


def make_model(folder: Path, phase: str = "pretrain") -> Path:
    folder.mkdir(exist_ok=True)
    make_data(folder / "data", num_documents=20)
    run = make_run(folder / "data")
    shape = dataclasses.replace(
        run.model, num_layers=4, width=128, num_heads=4, num_kv_heads=4, head_size=32, ffn_width=384, context=512
    )
    run = dataclasses.replace(run, model=shape)
    return make_checkpoint(folder / "model", folder / "data", phase=phase, run=run)


@contextlib.contextmanager
def serving(model: Path) -> Iterator[Server]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "HOMING_SERVE_TOKEN": TOKEN,
        "HOMING_HOME": f"{model}/h",
    }
    argv = [sys.executable, "-m", "homing.cli", "serve", str(model), "--port", "0", "--json", "--device", "cpu"]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield Server(json.loads(process.stdout.readline())["url"], process.pid)
        finally:
            process.terminate()


def in_another_process(function: Any, *arguments: Any) -> Any:
    """Run the clients in a process of their own, so that they do not share the interpreter with anything else."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def client_of(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=100)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False, limits=limits)


# -- throughput and equality -------------------------------------------------------------------------------------------


def throughput(url: str, num_clients: int) -> dict[str, float]:
    """Return tokens per second: the best of three for one client, and of two for many."""

    async def one(client: httpx.AsyncClient, seed: int, is_stream: bool) -> int:
        body = {"prompt": "the cat sat on", "max_tokens": TOKENS, "seed": seed, "stream": is_stream}
        if is_stream:
            body["stream_options"] = {"include_usage": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
            return int(json.loads(lines[-1][6:])["usage"]["completion_tokens"])
        response = await client.post("/v1/completions", json=body)
        return int(response.raise_for_status().json()["usage"]["completion_tokens"])

    async def measure(count: int, is_stream: bool) -> float:
        async with client_of(url) as client:
            await one(client, 0, is_stream)
            began = time.perf_counter()
            made = await asyncio.gather(*[one(client, seed, is_stream) for seed in range(count)])
            return sum(made) / (time.perf_counter() - began)

    found: dict[str, float] = {}
    for name, is_stream in (("", False), ("streamed_", True)):
        alone = max(asyncio.run(measure(1, is_stream)) for _ in range(3))
        together = max(asyncio.run(measure(num_clients, is_stream)) for _ in range(2))
        found |= {f"{name}alone_tok_s": round(alone), f"{name}together_tok_s": round(together)}
        found[f"{name}ratio"] = round(together / alone, 2)
    return found


def equality(url: str, model: Path, num_clients: int) -> int:
    """Return how many greedy texts, generated at once, are those that `generate` gives for each prompt alone."""
    words = ["the cat", "a dog ran", "red fish at night", "home to eat"]
    prompts = [f"{words[number % 4]} {number}" for number in range(num_clients)]

    async def ask() -> list[str]:
        async with client_of(url) as client:
            bodies = [{"prompt": prompt, "max_tokens": TOKENS, "temperature": 0} for prompt in prompts]
            found = await asyncio.gather(*[client.post("/v1/completions", json=body) for body in bodies])
            return [each.raise_for_status().json()["choices"][0]["text"] for each in found]

    decoder, tokenizer = load_for_use(model, "cpu")
    greedy = SamplingSettings(temperature=0.0)
    expected = []
    for prompt in prompts:
        ids = [tokenizer.end_of_text_id, *tokenizer.encode(prompt)]
        made = generate(decoder, ids, num_tokens=TOKENS, sampling=greedy, stop_ids=tokenizer.stop_ids)
        expected.append(tokenizer.decode(list(made)))
    return sum(found == wanted for found, wanted in zip(asyncio.run(ask()), expected, strict=True))


# -- expensive schemas -------------------------------------------------------------------------------------------------

# Each alternative is another state of the grammar, and all of them are alive at once, so a mask takes milliseconds.
EXPENSIVE = {
    "type": "array",
    "minItems": 40,
    "items": {
        "anyOf": [
            {
                "type": "object",
                "properties": {f"a{place}": {"type": "string"} for place in range(number)},
                "additionalProperties": {"type": "string"},
            }
            for number in range(14)
        ]
    },
}


def schemas(url: str, seconds: float) -> dict[str, float]:
    """Return percentiles of the time between two tokens of plain streams, alone and next to expensive schemas."""

    async def plain(client: httpx.AsyncClient, seed: int, ends: float) -> list[float]:
        gaps = []
        while time.monotonic() < ends:
            body = {
                "messages": [{"role": "user", "content": "the cat"}],
                "max_tokens": 200,
                "seed": seed,
                "stream": True,
            }
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                before = None
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        gaps += [now - before] if before is not None else []
                        before = now
        return gaps

    async def expensive(client: httpx.AsyncClient, seed: int, ends: float) -> int:
        number = 0
        while time.monotonic() < ends:
            body = {
                "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 200, "seed": seed,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": EXPENSIVE}},
            }  # fmt: skip
            response = await client.post("/v1/chat/completions", json=body)
            # An answer may fail, because the grammar needs more computation than llguidance is allowed.
            number += response.json()["usage"]["completion_tokens"] if response.status_code == 200 else 0
        return number

    async def measure(num_expensive: int) -> tuple[list[float], int]:
        async with client_of(url) as client:
            ends = time.monotonic() + seconds
            others = [asyncio.create_task(expensive(client, seed, ends)) for seed in range(num_expensive)]
            gaps = await asyncio.gather(*[plain(client, seed, ends) for seed in range(8)])
            return sorted(gap for own in gaps for gap in own), sum([await each for each in others])

    asyncio.run(measure(1))  # loads llguidance, and reads the vocabulary
    alone, _ = asyncio.run(measure(0))
    beside, num_tokens = asyncio.run(measure(4))
    p99 = [each[int(len(each) * 0.99)] for each in (alone, beside)]
    return {
        "schemas_alone_p99_ms": round(p99[0] * 1000, 2),
        "schemas_beside_p99_ms": round(p99[1] * 1000, 2),
        "schemas_delay": round(p99[1] / p99[0], 2),
        "schemas_tok_s": round(num_tokens / seconds),
    }


# -- hostile clients ---------------------------------------------------------------------------------------------------


def hostile(server: Server, seconds: float) -> dict[str, Any]:
    before = server.memory_mb()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        crowd = pool.apply_async(disturb, (server.url, seconds))
        health = pool.apply_async(watch_health, (server.url, seconds))
        found = {**crowd.get(), **health.get()}
    time.sleep(2)
    return {**found, "seconds": seconds, "memory_mb": round(before), "growth_mb": round(server.memory_mb() - before)}


def disturb(url: str, seconds: float) -> dict[str, int]:
    """Return how many requests of each kind were answered as they should be, and how many were not."""
    ends = time.monotonic() + seconds
    counts = {"answered": 0, "left": 0, "long_refused": 0, "errors": 0}
    long_body = json.dumps({"prompt": "moss " * (LONG_PROMPT_BYTES // 5)}).encode()

    async def behave(client: httpx.AsyncClient, seed: int) -> None:
        while time.monotonic() < ends:
            body = {"prompt": f"the cat {seed}", "max_tokens": 40, "seed": seed}
            response = await client.post("/v1/completions", json=body)
            counts["answered" if response.status_code == 200 else "errors"] += 1

    async def leave(client: httpx.AsyncClient, source: random.Random) -> None:
        while time.monotonic() < ends:
            body = {"prompt": "a dog", "max_tokens": 400, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                num_lines = source.randint(0, 20)
                async for _ in response.aiter_lines():
                    num_lines -= 1
                    if num_lines < 0:
                        break
            counts["left"] += 1

    async def send_long(client: httpx.AsyncClient) -> None:
        while time.monotonic() < ends:
            try:
                response = await client.post("/v1/completions", content=long_body)
                counts["long_refused" if response.status_code in (400, 413) else "errors"] += 1
            except httpx.TransportError:  # the server answers before it has read everything, and closes
                counts["long_refused"] += 1

    async def run() -> None:
        async with client_of(url) as client:
            await asyncio.gather(
                *[behave(client, seed) for seed in range(40)],
                *[leave(client, random.Random(seed)) for seed in range(10)],
                *[send_long(client) for _ in range(20)],
            )

    asyncio.run(run())
    return counts


def watch_health(url: str, seconds: float) -> dict[str, float]:
    ends, times = time.monotonic() + seconds, []
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        while time.monotonic() < ends:
            began = time.monotonic()
            client.get("/health").raise_for_status()
            times.append(time.monotonic() - began)
            time.sleep(0.05)
    times.sort()
    return {"health_max_s": round(times[-1], 3), "health_median_s": round(times[len(times) // 2], 3)}


if __name__ == "__main__":
    sys.exit(main())
