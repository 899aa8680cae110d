"""A RunPod pod as data: the body of the create call, the first command, how the pod terminates itself, and its state.

    args       bash -c '...' with the compressed startup script; RunPod passes it to the image's entrypoint
    may_end    file in which the pod records at boot whether its own key, provided by RunPod, can see the pod
    end        DELETE with that pod-scoped key; else GraphQL, else runpodctl; if nothing else works, stop the pod

This module is pure and makes no requests.
"""

from __future__ import annotations

import base64
import gzip
import json
import shlex
from decimal import Decimal
from typing import Any

from homing.cloud.check_numbers import Figures
from homing.cloud.machine_setup.startup_script import ROOT
from homing.cloud.providers.base import Instance, InstanceState
from homing.cloud.providers.runpod.offers import Choice, dollars, storage_rate
from homing.wire.boot_json import EndBilling

__all__ = [
    "KEY_ENV",
    "MAY_END",
    "POD_ENV",
    "args_of",
    "body_of",
    "end_billing",
    "end_command",
    "instance_of",
    "probe_command",
]

KEY_ENV, POD_ENV = "RUNPOD_API_KEY", "RUNPOD_POD_ID"  # RunPod sets both variables; the key is scoped to the pod
MAY_END = f"{ROOT}/may_end"
_MOST_DISK_GB = 10**6
_STATES: dict[str, InstanceState] = {
    "PROVISIONING": "requested",
    "STARTING": "booting",
    "RUNNING": "ready",
    "EXITED": "preempted",  # the GPU and program are gone, but a disk remains and bills
    "TERMINATED": "gone",
}
_SAID = {
    "EXITED": "it stopped or lost its host (EXITED)",
    "ERROR": "its container failed (ERROR)",
}
# This is a Python program, because the agent needs Python anyway and a bare image may lack curl. It contains no single
# quotes, because it is embedded in a single-quoted string.
_ASK = """
import json, os, urllib.error, urllib.request
key, pod = os.environ["RUNPOD_API_KEY"], os.environ["RUNPOD_POD_ID"]
def ask(method, url, body=None, must=""):
    head = {"authorization": "Bearer " + key, "content-type": "application/json", "user-agent": "homing"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, head, method=method), timeout=20) as reply:
            text = reply.read().decode("utf-8", "replace")
            return "" if "\\"errors\\"" not in text and must in text else "refused"
    except urllib.error.HTTPError as exc:
        return "%d %s" % (exc.code, exc.read(200).decode("utf-8", "replace"))
    except Exception as exc:
        return "no answer: %s" % exc
"""
_END = """
problem = ask("DELETE", URL + "/pods/" + pod)
for verb in ("podTerminate", "podStop"):
    if problem:
        print(verb + " after: " + problem)
        text = "mutation { " + verb + "(input: {podId: \\"" + pod + "\\"}) FIELDS}"
        text = text.replace("FIELDS", "{ id } " if verb == "podStop" else "")
        problem = ask("POST", GRAPHQL, {"query": text})
raise SystemExit(bool(problem))
"""
# It is enough if one API lets the key see the pod, because the end command tries all of them. GraphQL returns null for
# a pod that the key may not see.
_PROBE = """
import subprocess, time
query = {"query": "query { pod(input: {podId: \\"" + pod + "\\"}) { id } }"}
def by_tool():
    try:
        lines = [["runpodctl", "pod", "get", pod], ["runpodctl", "get", "pod", pod]]
        codes = [subprocess.run(line, capture_output=True, timeout=30).returncode for line in lines]
        return "" if 0 in codes else "refused"
    except Exception as exc:
        return "%s" % exc
ways = {
    "REST v2": lambda: ask("GET", URL + "/pods/" + pod),
    "GraphQL": lambda: ask("POST", GRAPHQL, query, pod),
    "runpodctl": by_tool,
}
for number in range(10):
    said = {}
    for name, way in ways.items():
        said[name] = " ".join(way().split())
        if not said[name]:
            print("yes: " + name)
            raise SystemExit
    if said["REST v2"][:3] in ("401", "403", "404") and said["GraphQL"][:3] in ("401", "403", "404", "ref"):
        break
    time.sleep(3)
print("no: " + "; ".join(name + ": " + problem for name, problem in said.items()))
"""


def end_command(url: str) -> str:
    """Return shell code that ends the billing of the pod it runs in. It exits with 0 if RunPod accepts the request."""
    pod = f'"${POD_ENV}"'
    others = " || ".join(f"runpodctl {verb} {pod}" for verb in ("pod delete", "remove pod", "stop pod"))
    return f"{_python(url, _END)} || {others}"


def end_billing(url: str) -> EndBilling:
    # The command sends no header. The variable is named here only to hide the key from the trainer and from sync.
    return EndBilling(kind="command", argv=["bash", "-c", end_command(url)], header_env={"authorization": KEY_ENV})


def probe_command(url: str) -> str:
    """Return shell code that checks, in the background, which API lets the pod's own key see the pod."""
    return f"{{ {_python(url, _PROBE)} | tee {MAY_END}.new; mv {MAY_END}.new {MAY_END}; }} &\n"


def args_of(startup: str) -> str:
    """Return the pod's first command as a single string, as the API expects it."""
    packed = base64.b64encode(gzip.compress(startup.encode(), mtime=0)).decode()
    # Unpack the script to a file, because commands in a script read from stdin could consume the rest of the script.
    return f"bash -c 'f=$(mktemp) && echo {packed} | base64 -d | gzip -d > $f && exec bash $f'"


def body_of(mark: str, choice: Choice, settings: dict[str, Any], *, args: str, min_cuda: str) -> dict[str, Any]:
    """Return the body of the create call.

    `settings` are image, template, registry, disk_gb, env, ports, data_centers, volume (id, path) and
    global_networking.
    """
    body: dict[str, Any] = {
        "name": mark,
        "cloud": choice.cloud.upper(),
        "gpu": {"id": choice.gpu_id, "count": choice.count, "minCudaVersion": min_cuda},
        "args": args,
        "disk": settings["disk_gb"],
        "env": settings["env"],
        "ports": ["22/tcp", *(port for port in settings["ports"] if port != "22/tcp")],
    }
    optional = {
        "image": settings["image"],
        "templateId": settings["template"],
        "registry": settings["registry"],
        "dataCenterIds": settings["data_centers"],
        "globalNetworking": settings["global_networking"],
    }
    body.update({name: value for name, value in optional.items() if value})
    if settings["volume_id"]:
        body["mounts"] = {"network": [{"volumeId": settings["volume_id"], "path": settings["volume_path"]}]}
    return body


def instance_of(pod: dict[str, Any], *, page: str, now: float, spend_usd: Decimal | None = None) -> Instance:
    """Convert RunPod's data for a pod to an Instance.

    RUNNING without a runtime means that the host has not started the pod yet.
    """
    status, read = str(pod["status"]), Figures("runpod")
    cost, disk_gb = read.rate("cost", pod.get("cost")), read.whole("disk", pod.get("disk"), _MOST_DISK_GB)
    state: InstanceState = _STATES.get(status, "unknown")
    if status == "RUNNING" and pod.get("runtime") is None:
        state = "booting"
    return Instance(
        id=str(pod["id"]),
        mark=str(pod["name"]),
        provider="runpod",
        state=state,
        billing="no" if state == "gone" else "yes",
        rate_usd_per_hour=dollars(cost or Decimal(0)) + storage_rate(disk_gb or 0),
        created_at=read.moment("createdAt", pod.get("createdAt"), now),
        spend_usd=spend_usd,
        is_running=status not in ("EXITED", "ERROR", "TERMINATED"),
        detail=_SAID.get(status, status),
        page=page,
        problems=tuple(read.problems),
    )


def _python(url: str, program: str) -> str:
    graphql = url.removesuffix("/v2") + "/graphql"
    head = f"URL, GRAPHQL = {json.dumps(url)}, {json.dumps(graphql)}\n"
    return f"python3 -I -c {shlex.quote((_ASK + head + program).strip())}"
