"""Stages before training: each is reported, none is retried forever, and a faulty machine is returned."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from homing.cloud.machine_setup.code_bundle import TORCH_CUDA, TORCH_RANGE, WHEEL, wheel_bytes
from homing.instance import bootstrap
from homing.wire import codec, file_names
from homing.wire.boot_json import Boot, Bootstrap, EndBilling
from homing.wire.event_lines import Event
from homing.world import Completed, World

SMI = "NVIDIA H100 80GB HBM3, 570.86.15\n"


class Machine(World):
    """Answers the programs that a test machine lacks, and counts what was asked."""

    def __init__(self, **answers: str | int) -> None:
        self.answers, self.makes_folders = answers, False
        self.asked: list[list[str]] = []

    def run(
        self, argv: Sequence[str], timeout_s: float, env: dict[str, str] | None = None, stdin: str = ""
    ) -> Completed:
        self.asked.append(list(argv))
        if self.makes_folders and "venv" in argv:
            self.mkdir(f"{argv[-1]}/lib/python3.12/site-packages")
        for name, answer in self.answers.items():
            if name.replace("_", "-") in " ".join(argv):
                return Completed(0, answer, "") if isinstance(answer, str) else Completed(answer, "", "it broke")
        return super().run(argv, timeout_s, env, stdin)


@pytest.fixture
def boot(tmp_path: Path) -> Boot:
    (tmp_path / "work" / "run").mkdir(parents=True)
    return Boot(
        run_id="amber-1", run_name="amber", mark="homing-test-1", attempt=1, work_dir=str(tmp_path / "work"),
        store="file:/none", inputs=[], trainer_argv=["python-there"], sync_argv=[],
        end_billing=EndBilling(kind="command", argv=["true"]), started_at=0.0, rate_usd_per_hour="1",
        spent_before_usd="0", spend_limit_usd="1", time_limit_s=0.0, idle_limit_s=0.0, stall_factor=10.0,
    )  # fmt: skip


def with_(boot: Boot, **messages: object) -> Boot:
    return dataclasses.replace(boot, bootstrap=Bootstrap(**messages))  # type: ignore[arg-type]


def events(boot: Boot) -> list[Event]:
    lines = (Path(boot.work_dir) / "run" / file_names.EVENTS).read_text().splitlines()
    return [codec.loads(Event, line) for line in lines]


def problem(boot: Boot) -> str:
    return str(json.loads((Path(boot.work_dir) / bootstrap.NOTE).read_text())["problem"])


def wheel(folder: Path, *names_: str) -> tuple[str, str]:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names_:
            archive.writestr(name, f"# {name}\n")
    (folder / "x.whl").write_bytes(buffer.getvalue())
    return "x.whl", hashlib.sha256(buffer.getvalue()).hexdigest()


@pytest.mark.acceptance(71)
def test_every_stage_is_reported_with_its_name_and_seconds(boot: Boot) -> None:
    assert bootstrap.run(with_(boot), World()) == 0
    messages = [(event.kind, event.data["stage"]) for event in events(boot)]
    assert messages == [
        ("stage_done", stage) for stage in ("directories", "disk", "gpu", "code", "environment", "compiler", "probe")
    ]
    assert all(event.data["seconds"] >= 0 for event in events(boot))


def test_what_came_to_an_end_is_not_done_again_by_a_later_agent(boot: Boot) -> None:
    assert bootstrap.run(with_(boot), World()) == 0
    assert bootstrap.run(with_(boot), World()) == 0
    assert len(events(boot)) == 7


@pytest.mark.acceptance(76)
def test_a_stage_that_failed_is_not_tried_again(boot: Boot) -> None:
    bad = with_(boot, disk_bytes=10**18)
    assert bootstrap.run(bad, World()) == 1
    assert "the run needs" in problem(boot)
    assert bootstrap.run(bad, World()) == 1
    assert [event.kind for event in events(boot)] == ["stage_done", "stage_failed"]


def test_a_stage_that_takes_the_process_down_is_begun_three_times_and_no_more(boot: Boot) -> None:
    class Deadly(World):
        def free_bytes(self, path: object) -> int:
            raise KeyboardInterrupt  # the process ends here, with nothing said

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            bootstrap.run(with_(boot), Deadly())
    assert bootstrap.run(with_(boot), World()) == 1
    assert "started 3 times" in problem(boot)


@pytest.mark.acceptance(47)
def test_a_volume_that_cannot_be_written_is_named(boot: Boot, tmp_path: Path) -> None:
    (tmp_path / "volume").write_text("in the way")
    assert bootstrap.run(with_(boot, folders=[str(tmp_path / "volume" / "datasets")]), World()) == 1
    assert "directories" in problem(boot)
    assert str(tmp_path / "volume") in problem(boot)


@pytest.mark.acceptance(71)
def test_a_disk_that_gives_back_something_else_is_found(boot: Boot) -> None:
    class Rotten(World):
        def read(self, path: object, offset: int = 0, max_bytes: int = -1) -> bytes:
            data = super().read(path, offset, max_bytes)  # type: ignore[arg-type]
            return data[:-1] + b"?" if ".check-" in str(path) else data

    assert bootstrap.run(with_(boot), Rotten()) == 1
    assert "does not read back" in problem(boot)


@pytest.mark.parametrize(
    ("answer", "count", "wrong"),
    [
        (SMI, 1, ""),
        (SMI * 2, 2, ""),
        (SMI, 2, "but the driver shows"),
        ("NVIDIA A10, 1\n", 1, "but the driver shows"),
        (9, 1, "broke"),
    ],
)
def test_the_card_is_the_one_that_was_rented(boot: Boot, answer: str | int, count: int, wrong: str) -> None:
    messages = with_(boot, gpu_names=["h100", "h10080gbhbm3"], num_gpus=count)
    assert bootstrap.run(messages, Machine(nvidia_smi=answer)) == int(bool(wrong))
    if wrong:
        assert wrong in problem(boot)


@pytest.mark.acceptance("X22")
def test_code_is_checked_by_hash_unpacked_once_and_kept_in_its_folder(boot: Boot, tmp_path: Path) -> None:
    name, sha256 = wheel(Path(boot.work_dir), "homing/__init__.py", "homing/a/b.py")
    messages = {"code": name, "code_sha256": sha256, "code_dir": str(tmp_path / "code")}
    assert bootstrap.run(with_(boot, **messages), World()) == 0
    assert (tmp_path / "code" / "homing" / "a" / "b.py").read_text() == "# homing/a/b.py\n"
    (Path(boot.work_dir) / bootstrap.NOTE).unlink()
    (Path(boot.work_dir) / name).unlink()
    assert bootstrap.run(with_(boot, **messages), World()) == 0, "unpacked before: the wheel is not needed"


@pytest.mark.acceptance(37)
@pytest.mark.parametrize("name", ["../evil.py", "/tmp/evil.py", "homing/../../evil.py"])
def test_code_cannot_be_written_outside_its_folder(boot: Boot, tmp_path: Path, name: str) -> None:
    file, sha256 = wheel(Path(boot.work_dir), name)
    messages = {"code": file, "code_sha256": sha256, "code_dir": str(tmp_path / "a" / "b" / "code")}
    assert bootstrap.run(with_(boot, **messages), World()) == 1
    assert "outside" in problem(boot)
    assert not list(tmp_path.rglob("evil.py"))


@pytest.mark.acceptance(37, 46)
def test_another_wheel_than_the_one_that_left_home_is_refused(boot: Boot, tmp_path: Path) -> None:
    name, _ = wheel(Path(boot.work_dir), "homing/__init__.py")
    messages = {"code": name, "code_sha256": "0" * 64, "code_dir": str(tmp_path / "code")}
    assert bootstrap.run(with_(boot, **messages), World()) == 1
    assert not (tmp_path / "code" / "homing").exists()


@pytest.mark.acceptance(76, "X22")
@pytest.mark.slow
def test_an_environment_is_made_from_the_lock_once_and_found_again_by_its_fingerprint(
    boot: Boot, tmp_path: Path
) -> None:
    lock = tmp_path / "tiny-1.0-py3-none-any.whl"
    _tiny_wheel(lock)
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    messages = with_(
        boot,
        lock=[f"tiny @ file://{lock} --hash=sha256:{digest}"],
        python=sys.executable,
        env_dir=str(tmp_path / "cache" / "env-"),
    )
    assert bootstrap.run(messages, Machine()) == 0
    python = Path(boot.work_dir) / "env" / "bin" / "python"
    assert World().run([str(python), "-c", "import tiny; print(tiny.N)"], 60).out.strip() == "7"
    (Path(boot.work_dir) / bootstrap.NOTE).unlink()
    again = Machine()
    assert bootstrap.run(messages, again) == 0
    assert not [argv for argv in again.asked if "venv" in argv or "install" in argv]
    assert "already created" in [event for event in events(boot) if event.data["stage"] == "environment"][-1].text
    other = dataclasses.replace(messages, work_dir=str(tmp_path / "other"))
    (tmp_path / "other" / "run").mkdir(parents=True)
    assert bootstrap.run(other, Machine()) == 0
    assert len([path for path in (tmp_path / "cache").glob("env-*") if path.is_dir()]) == 1


def _tiny_wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny.py", "N = 7\n")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")


@pytest.mark.acceptance(8)
@pytest.mark.parametrize(
    ("said", "is_reference"),
    [
        ("3 12\n2.11.0+cu130\n/opt/image site\n", True),
        ("3 12\n2.10.1\n/opt/x\n", False),
        ("3 12\n2.14.0\n/opt/x\n", False),
        ("3 12\n\n", False),
    ],
)
def test_the_images_own_torch_is_used_if_it_is_in_range(
    boot: Boot, tmp_path: Path, said: str, is_reference: bool
) -> None:
    # -c asks for versions, venv and pip do nothing here, ln leads to where they would have made it.
    machine = Machine(**{"importlib": said, "venv": "", "install": "", "ln": "", "uv --version": 1})
    messages = with_(
        boot, lock=["numpy==2.0"], torch="torch==2.13.0", torch_lock=["torch==2.13.0 --hash=sha256:aa"],
        torch_range=list(TORCH_RANGE), python="python3",
        env_dir=str(tmp_path / "env-"),
    )  # fmt: skip
    machine.makes_folders = True
    assert bootstrap.run(messages, machine) == 0, problem(boot)
    (env,) = (path for path in tmp_path.glob("env-*") if path.is_dir())
    assert ("torch==2.13.0" in (env / "lock.txt").read_text()) is not is_reference
    pth = env / "lib/python3.12/site-packages/image.pth"
    assert pth.exists() is is_reference
    assert not is_reference or "'/opt/image site'" in pth.read_text()


@pytest.mark.slow
def test_a_torch_of_another_environment_is_visible_from_the_new_one(boot: Boot, tmp_path: Path) -> None:
    messages = with_(
        boot, lock=[], torch="torch==2.13.0", torch_range=list(TORCH_RANGE), python=sys.executable,
        env_dir=str(tmp_path / "env-"),
    )  # fmt: skip
    assert bootstrap.run(messages, World()) == 0, problem(boot)
    python = Path(boot.work_dir) / "env/bin/python"
    code = "import importlib.util as u; print(u.find_spec('torch').origin)"
    assert "torch" in World().run([str(python), "-c", code], 60).out


def test_while_another_launch_makes_the_environment_it_is_waited_for_and_not_for_ever(
    boot: Boot, tmp_path: Path
) -> None:
    class Taken(Machine):
        waited_s = 0.0

        def lock(self, path: object) -> bool:
            return False

        def monotonic(self) -> float:
            return self.waited_s

        def sleep(self, seconds: float) -> None:
            self.waited_s += seconds

    messages = with_(boot, lock=["x==1"], python="python3", env_dir=str(tmp_path / "env-"))
    taken = Taken(importlib="3 12\n")
    assert bootstrap.run(messages, taken) == 1
    assert "another launch" in problem(boot)
    assert taken.waited_s >= bootstrap.INSTALL_S
    assert not any("venv" in argv for argv in taken.asked)


class WithoutUv(Machine):
    """A machine that has pip, and an index that it asks."""

    def __init__(self, **answers: str | int) -> None:
        quiet: dict[str, str | int] = {
            "venv": "", "pip --version": "pip 22.0.2\n", "install": "", "apt-get": "", "ln": "", "uv --version": 1
        }  # fmt: skip
        super().__init__(**{**quiet, **answers})
        self.makes_folders, self.pythons_dir = True, ""
        self.waited: list[float] = []

    def run(
        self, argv: Sequence[str], timeout_s: float, env: dict[str, str] | None = None, stdin: str = ""
    ) -> Completed:
        self.pythons_dir = (env or {}).get("UV_PYTHON_INSTALL_DIR", self.pythons_dir)
        return super().run(argv, timeout_s, env, stdin)

    def sleep(self, seconds: float) -> None:
        self.waited.append(seconds)


def uv_in(folder: Path) -> str:
    return str(folder / "uv/bin/uv")


def brought(machine: Machine) -> list[list[str]]:
    return [argv for argv in machine.asked if "--target" in argv]


TORCH = ["torch==2.13.0 --hash=sha256:aa", "nvidia-cublas==13 --hash=sha256:bb"]
UV = "uv==0.13.8 --hash=sha256:cc"


def bare(boot: Boot, tmp_path: Path, **more: object) -> Boot:
    return with_(
        boot, lock=["numpy==2.0"], torch="torch==2.13.0", torch_lock=TORCH, torch_range=list(TORCH_RANGE),
        cuda=TORCH_CUDA, uv=UV,
        python="python3", env_dir=str(tmp_path / "env-"), **more,
    )  # fmt: skip


def installs(machine: Machine) -> list[list[str]]:
    """Of what the trainer needs."""
    return [argv for argv in machine.asked if "install" in argv and "-r" in argv and "--target" not in argv]


@pytest.mark.acceptance(8)
def test_a_python_that_is_too_old_gets_one_by_uv_which_comes_from_the_index(boot: Boot, tmp_path: Path) -> None:
    machine = WithoutUv(importlib="3 10\n2.12.0\n/opt/x\n")
    assert bootstrap.run(bare(boot, tmp_path), machine) == 0, problem(boot)
    uv = uv_in(tmp_path)
    assert brought(machine) == [
        [
            *("python3", "-m", "pip", "install", "--no-input", "--upgrade", "--target", f"{tmp_path}/uv"),
            *("--require-hashes", "--only-binary", ":all:", "-r", f"{tmp_path}/uv.txt"),
        ]
    ]
    assert (tmp_path / "uv.txt").read_text() == UV + "\n"
    (env,) = (path for path in tmp_path.glob("env-*") if path.is_dir())
    assert [uv, "venv", "--python", bootstrap.PYTHON, "--clear", str(env)] in machine.asked
    assert machine.pythons_dir == str(tmp_path / "python"), "with the environments, wherever those lie"
    messages = [uv, "pip", "install", "--python", f"{env}/bin/python", *bootstrap.VERIFIED, "-r", f"{env}/lock.txt"]
    assert installs(machine) == [messages], "no pip is in what uv makes"
    lock = (env / "lock.txt").read_text().splitlines()
    assert lock == ["numpy==2.0", *TORCH], "the torch of an old Python is of no use"
    assert f"Python {bootstrap.PYTHON} from uv, because python3 is 3.10" in events(boot)[4].text


def test_a_python_that_makes_no_environments_has_them_made_by_uv(boot: Boot, tmp_path: Path) -> None:
    """Ubuntu's own, without the package that brings ensurepip."""
    machine = WithoutUv(importlib="3 12\n\n")
    machine.answers = {"python3 -m venv": 1, **machine.answers}
    assert bootstrap.run(bare(boot, tmp_path), machine) == 0, problem(boot)
    made = [argv[:4] for argv in machine.asked if "venv" in argv]
    assert made == [["python3", "-m", "venv", made[0][3]], [uv_in(tmp_path), "venv", "--python", "python3"]]
    assert installs(machine)[0][0] == uv_in(tmp_path)


@pytest.mark.parametrize(("said", "is_reference"), [("uv 0.8.0\n", True), ("uv 0.7.22\n", False)])
def test_the_machines_own_uv_is_taken_if_it_is_new_enough(
    boot: Boot, tmp_path: Path, said: str, is_reference: bool
) -> None:
    machine = WithoutUv(**{"importlib": "3 10\n\n", "uv --version": said})
    assert bootstrap.run(bare(boot, tmp_path), machine) == 0, problem(boot)
    assert installs(machine)[0][0] == ("uv" if is_reference else uv_in(tmp_path))


@pytest.mark.parametrize(("num_silent", "code"), [(1, 0), (2, 0), (3, 1)])
def test_an_index_that_is_silent_for_a_while_is_asked_again_and_not_for_ever(
    boot: Boot, tmp_path: Path, num_silent: int, code: int
) -> None:
    class Silent(WithoutUv):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if len(self.waited) == num_silent:
                self.answers["--target"] = ""

    machine = Silent(importlib="3 10\n")
    machine.answers = {"--target": 1, **machine.answers}
    assert bootstrap.run(bare(boot, tmp_path), machine) == code
    assert machine.waited == list(bootstrap.PAUSES_S)[:num_silent]
    assert len(brought(machine)) == min(3, num_silent + 1)
    assert not code or "it broke" in problem(boot)


@pytest.mark.parametrize("may_add", [True, False])
def test_where_pip_is_missing_too_a_rented_machine_gets_it_and_one_of_somebodys_is_left_as_it_is(
    boot: Boot, tmp_path: Path, may_add: bool
) -> None:
    machine = WithoutUv(**{"importlib": "3 10\n", "pip --version": 1})
    assert bootstrap.run(bare(boot, tmp_path, may_add=may_add), machine) == (0 if may_add else 1)
    assert any("apt-get" in argv and "python3-pip" in argv for argv in machine.asked) is may_add
    assert len(brought(machine)) == may_add
    assert may_add or "install uv on the host" in problem(boot)


@pytest.mark.parametrize(("num_failures", "code"), [(1, 0), (2, 0), (3, 1)])
def test_a_python_that_does_not_come_at_once_is_asked_for_again_and_not_for_ever(
    boot: Boot, tmp_path: Path, num_failures: int, code: int
) -> None:
    class Slow(WithoutUv):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if len(self.waited) == num_failures:
                self.answers["venv"] = ""

    machine = Slow(importlib="3 10\n", venv=1)
    assert bootstrap.run(bare(boot, tmp_path), machine) == code
    assert machine.waited == list(bootstrap.PAUSES_S)[:num_failures]
    assert machine.pythons_dir == str(tmp_path / "python")
    assert not code or "it broke" in problem(boot)


@pytest.mark.parametrize(("said", "is_taken"), [("uv 0.9.30 (x86_64)\n", True), ("uv 0.7.22\n", False), (126, False)])
def test_an_existing_uv_is_used_only_if_it_runs_here_and_is_new_enough(
    boot: Boot, tmp_path: Path, said: str | int, is_taken: bool
) -> None:
    """On a volume it outlives its machine, and the next one may be of another kind."""
    (tmp_path / "uv/bin").mkdir(parents=True)
    (tmp_path / "uv/bin/uv").write_text("of another machine")
    machine = WithoutUv(importlib="3 10\n")
    machine.answers = {"/uv --version": said, **machine.answers}  # that on the path has no folder before it
    assert bootstrap.run(bare(boot, tmp_path), machine) == 0, problem(boot)
    assert installs(machine)[0][0] == uv_in(tmp_path)
    assert (brought(machine) == []) is is_taken


@pytest.mark.acceptance(8)
@pytest.mark.parametrize(
    ("smi", "said", "is_older"),
    [
        ("| Driver Version: 550.54.15  CUDA Version: 12.4 |", "3 12\n\n", True),
        ("| Driver Version: 550.54.15  CUDA Version: 12.4 |", "3 10\n\n", True),
        (f"| Driver Version: 580.95.05  CUDA Version: {TORCH_CUDA} |", "3 12\n\n", False),
        ("| Driver Version: 590.44.01  CUDA Version: 13.1 |", "3 12\n\n", False),
        ("nothing that anybody can read", "3 12\n\n", False),
        ("| Driver Version: 550.54.15  CUDA Version: 12.4 |", "3 12\n2.11.0+cu126\n/opt/x\n", False),
    ],
)
def test_a_driver_that_is_older_than_our_torch_gets_the_wheel_for_it(
    boot: Boot, tmp_path: Path, smi: str, said: str, is_older: bool
) -> None:
    machine = WithoutUv(**{"importlib": said, "--query-gpu": SMI, "nvidia-smi": smi})
    messages = bare(boot, tmp_path, num_gpus=1, older_cuda=["12.9", "12.6"], torch_index="https://index.test/whl")
    assert bootstrap.run(messages, machine) == 0, problem(boot)
    (install,) = installs(machine)
    (env,) = (path for path in tmp_path.glob("env-*") if path.is_dir())
    assert "--require-hashes" in install
    unhashed = [argv[-2:] for argv in machine.asked if "--index-url" in argv]
    assert unhashed == ([["https://index.test/whl/cu129", "torch==2.13.0"]] if is_older else [])
    is_image = bool(said.splitlines()[1:2] != [""])
    wanted = ["numpy==2.0"] if is_older or is_image else ["numpy==2.0", *TORCH]
    assert (env / "lock.txt").read_text().splitlines() == wanted
    if is_older:
        assert "CUDA 12.4 driver, from PyTorch's index, without a hash check" in events(boot)[4].text


def test_a_machine_without_a_card_asks_no_driver(boot: Boot, tmp_path: Path) -> None:
    machine = WithoutUv(importlib="3 12\n\n")
    assert bootstrap.run(bare(boot, tmp_path), machine) == 0, problem(boot)
    assert not any("nvidia-smi" in argv for argv in machine.asked)


def test_a_torch_that_sees_no_gpu_on_a_gpu_instance_is_reported(boot: Boot) -> None:
    messages = with_(boot, num_gpus=1, probe_argv=["probe-it"], probe_floor={"matmul_tflops": 300.0})
    answers: dict[str, str | int] = {"nvidia-smi": SMI, "probe-it": '{"device": "cpu", "torch": "2.13.0+cu130"}'}
    assert bootstrap.run(messages, Machine(**answers)) == 1
    assert "torch 2.13.0+cu130 sees no GPU" in problem(boot)


@pytest.mark.parametrize(
    ("may_add", "before", "after", "said"),
    [
        (True, "", "", "are installed"),
        (True, "a C compiler and Python.h", "", "with apt-get"),
        (True, "Python.h", "Python.h", "Python.h is missing"),
        (False, "a C compiler", "", "a C compiler is missing"),
    ],
)
def test_a_rented_machine_gets_the_compiler_that_triton_needs_and_a_persons_own_is_left_as_it_is(
    boot: Boot, may_add: bool, before: str, after: str, said: str
) -> None:
    class Apt(Machine):
        def run(
            self, argv: Sequence[str], timeout_s: float, env: dict[str, str] | None = None, stdin: str = ""
        ) -> Completed:
            done = super().run(argv, timeout_s, env, stdin)
            if "install" in argv:
                self.answers["Python.h"] = after
            return done

    machine = Apt(**{"--query-gpu": SMI, "Python.h": before, "apt-get": "", "probe-it": "{}"})
    messages = with_(boot, num_gpus=1, may_add=may_add, probe_argv=["probe-it"])
    assert bootstrap.run(messages, machine) == 0, problem(boot)
    assert said in events(boot)[5].text
    assert any("apt-get" in argv for argv in machine.asked) is (may_add and bool(before))


def test_missing_build_requirements_of_python_are_reported(tmp_path: Path) -> None:
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    for path, lacks in ((str(tmp_path), False), ("/nowhere", True)):
        said = World().run([sys.executable, "-c", bootstrap.LACKS], 60.0, {"PATH": path})
        assert said.code == 0, said.err
        assert ("a C compiler" in said.out) is lacks


def test_a_gpu_far_too_slow_is_returned_with_its_measurements(boot: Boot) -> None:
    floor = {"matmul_tflops": 300.0}
    slow = with_(boot, probe_argv=["probe-it"], probe_floor=floor)
    assert bootstrap.run(slow, Machine(probe_it='{"matmul_tflops": 100.0}')) == 1
    assert "matmul_tflops 100 of 300" in problem(boot)


@pytest.mark.acceptance(76)
@pytest.mark.parametrize(("num_failures", "code"), [(1, 0), (2, 0), (3, 1)])
def test_a_network_that_fails_while_packages_come_is_tried_again_and_not_for_ever(
    boot: Boot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_failures: int, code: int
) -> None:
    machine = Machine(**{"importlib": "3 12\n\n", "venv": "", "ln": "", "uv --version": 1, "install": 1})
    machine.makes_folders = True
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == num_failures:
            machine.answers["install"] = ""

    monkeypatch.setattr(machine, "sleep", sleep)
    messages = with_(boot, lock=["numpy==2.0"], python="python3", env_dir=str(tmp_path / "env-"))
    assert bootstrap.run(messages, machine) == code
    assert waited == list(bootstrap.PAUSES_S)[:num_failures]
    assert len([argv for argv in machine.asked if "install" in argv]) == len(waited) + 1
    assert len([argv for argv in machine.asked if "venv" in argv]) == 1, "what came already is kept"
    if code:
        assert "it broke" in problem(boot)


@pytest.mark.acceptance(8)
@pytest.mark.parametrize("answer", ['{"matmul_tflops": NaN}', "{}", "not json", "", 1])
def test_a_probe_without_a_good_figure_fails(boot: Boot, answer: str | int) -> None:
    slow = with_(boot, probe_argv=["probe-it"], probe_floor={"matmul_tflops": 300.0})
    assert bootstrap.run(slow, Machine(probe_it=answer)) == 1
    assert problem(boot).startswith("Stage probe failed"), "and not for anything else"


def test_a_good_probe_is_an_event_with_its_figures(boot: Boot) -> None:
    good = with_(boot, probe_argv=["probe-it"], probe_floor={"matmul_tflops": 300.0})
    assert bootstrap.run(good, Machine(probe_it='{"matmul_tflops": 600.5}')) == 0
    assert "600.5" in events(boot)[-1].text


def test_it_runs_straight_from_the_wheel_on_a_python_that_has_nothing_installed(boot: Boot, tmp_path: Path) -> None:
    from homing.cloud.launch.run_documents import VERIFIED_START

    work = Path(boot.work_dir)
    (work / WHEEL).write_bytes(wheel_bytes(World()))
    messages = {"code": WHEEL, "code_sha256": World().sha256(work / WHEEL), "code_dir": str(tmp_path / "code")}
    (work / file_names.BOOT).write_text(codec.dumps(with_(boot, **messages)))

    def argv(sha256: str) -> list[str]:
        start = [sys.executable, "-S", "-I", "-c", VERIFIED_START]
        return [*start, str(work / WHEEL), sha256, str(work / file_names.BOOT)]

    done = World().run(argv(messages["code_sha256"]), 60.0)
    assert (done.code, done.err) == (0, "")
    assert (tmp_path / "code" / "homing" / "instance" / "bootstrap.py").exists()
    (work / bootstrap.NOTE).unlink()
    (work / file_names.BOOT).write_text(
        codec.dumps(with_(boot, **{**messages, "code_dir": str(tmp_path / "b"), "code_sha256": "0"}))
    )
    assert World().run(argv(messages["code_sha256"]), 60.0).code == 1
    assert "is not the file that was sent" in problem(boot)
    refused = World().run(argv("0" * 64), 60.0)
    assert refused.code == 1
    assert "was replaced: its sha256 is " + messages["code_sha256"] in refused.err


@pytest.mark.regression("instance-hashes")
def test_packages_are_installed_only_with_their_hashes(boot: Boot, tmp_path: Path) -> None:
    for said in ("3 12\n\n", "3 10\n\n", "3 12\n2.11.0\n/opt/image\n"):
        (tmp_path / "work" / bootstrap.NOTE).unlink(missing_ok=True)
        machine = WithoutUv(importlib=said)
        messages = with_(
            boot, lock=["numpy==2.0 --hash=sha256:aa"], torch="torch==2.13.0", torch_range=list(TORCH_RANGE),
            python="python3", env_dir=str(tmp_path / "env-"),
        )  # fmt: skip
        assert bootstrap.run(messages, machine) == 0, problem(boot)
        for argv in machine.asked:
            assert "install" not in argv or "apt-get" in argv or "--require-hashes" in argv, argv
