"""Switching it on and off: for an environment, for a program, for the processes it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import forebay
from forebay.deepspeed import hook
from runs import FOREBAY, SECONDS_MAX, Program, run

pytestmark = pytest.mark.timeout(4 * SECONDS_MAX)

PATHS = [path for path in sys.path if path and Path(path).is_dir() and "site-packages" in path]

FAKE = "fake = True\nfrom deepspeed import ops\n"


class Environment:
    """A virtual environment that sees the packages of this one, or none."""

    def __init__(self, folder: Path, *, with_packages: bool) -> None:
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60
        )
        self.python = str(folder / "bin" / "python")
        self.site = next(folder.glob("lib/python*/site-packages"))
        if with_packages:
            (self.site / "others.pth").write_text("\n".join(PATHS))

    def run(self, *arguments: str, expected: int = 0) -> str:
        return run(*arguments, expected=expected, python=self.python)

    def hook(self, action: str, *, as_json: bool = False, expected: int = 0) -> str:
        call = f"hook.run({action!r}, json={as_json})"
        code = f"from forebay.deepspeed import hook; raise SystemExit({call})"
        return self.run("-c", code, expected=expected)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("shared"), with_packages=True)


@pytest.fixture
def environment(shared: Environment) -> Environment:
    (shared.site / hook.FILE_NAME).unlink(missing_ok=True)
    return shared


def fake_deepspeed(folder: Path) -> None:
    """Write a package of that name, which is imported in no time."""
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "__init__.py").write_text(FAKE)
    (folder / "deepspeed" / "ops.py").write_text("")


def test_enabling_is_one_file_and_disabling_leaves_none(environment: Environment) -> None:
    before = sorted(os.listdir(environment.site))
    assert "is off" in environment.hook("status")
    for _ in range(2):
        assert "is on" in environment.hook("enable")
        assert sorted(os.listdir(environment.site)) == sorted([*before, hook.FILE_NAME])
    assert len((environment.site / hook.FILE_NAME).read_text().splitlines()) == 1
    state = json.loads(environment.hook("status", as_json=True))
    assert state["enabled"] is state["works"] is state["current"] is True
    assert state["files"] == [str((environment.site / hook.FILE_NAME).resolve())]
    assert state["python"] == environment.python
    assert state["deepspeed"].count(".") >= 2
    for _ in range(2):
        assert "is off" in environment.hook("disable")
        assert sorted(os.listdir(environment.site)) == before
    state = json.loads(environment.hook("status", as_json=True))
    assert state["enabled"] is state["works"] is False


def test_an_enabled_environment_imports_nothing_until_deepspeed_is(
    environment: Environment,
) -> None:
    count = "import sys; print(sorted(name.partition('.')[0] for name in sys.modules))"
    plain = set(eval(environment.run("-c", count)))
    environment.hook("enable")
    enabled = set(eval(environment.run("-c", count)))
    assert enabled - plain <= {"warnings"}
    # Asking whether DeepSpeed is there isn't importing it.
    environment.run(
        "-c",
        "import importlib.util, sys\n"
        "assert importlib.util.find_spec('deepspeed')\n"
        "assert 'forebay' not in sys.modules",
    )


def test_programs_and_their_workers_run_on_forebay_once_enabled(
    environment: Environment, tmp_path: Path
) -> None:
    environment.hook("enable")
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import multiprocessing, sys

            def loaded():
                from deepspeed.ops.op_builder import AsyncIOBuilder
                return AsyncIOBuilder().load().__name__

            if __name__ == "__main__":
                for method in ("spawn", "forkserver"):
                    with multiprocessing.get_context(method).Pool(1) as pool:
                        print(method, pool.apply(loaded))
                print("main", loaded())
            """
        )
    )
    for options in ([], ["-I"], ["-O"]):
        output = environment.run(*options, str(program))
        for name in ("spawn", "forkserver", "main"):
            assert f"{name} forebay.deepspeed.async_io" in output
    output = environment.run("-c", "import sys; print(sys.flags.no_site)", "-S")
    assert output == "0\n"


def test_what_is_left_after_an_uninstall_prints_nothing_and_breaks_nothing(
    tmp_path: Path,
) -> None:
    environment = Environment(tmp_path / "venv", with_packages=False)
    hook.enable(environment.site)
    assert environment.run("-c", "print('started')") == "started\n"
    assert environment.run("-I", "-X", "dev", "-c", "print('started')") == "started\n"
    fake_deepspeed(environment.site)
    output = environment.run("-c", "import deepspeed; print('fake', deepspeed.fake)")
    assert "fake True" in output
    assert output.count("Warning") == 1
    assert hook.FILE_NAME in output
    assert hook.disable(environment.site) == [environment.site / hook.FILE_NAME]
    assert environment.run("-c", "import deepspeed; print(deepspeed.fake)") == "True\n"


def test_a_file_of_another_version_is_told_and_replaced(environment: Environment) -> None:
    path = environment.site / hook.FILE_NAME
    path.write_text("import sys\n")
    assert "another version" in environment.hook("status", expected=1)
    assert "doesn't run" in environment.hook("status", expected=1)
    environment.hook("enable")
    assert "problem" not in environment.hook("status")


def test_a_file_that_cant_be_read_is_told_and_keeps_no_report_from_being_made(
    environment: Environment,
) -> None:
    (environment.site / hook.FILE_NAME).mkdir()
    try:
        assert "another version" in environment.hook("status", expected=1)
        environment.hook("enable", expected=3)
        output = environment.run("-c", "from forebay import _facts; print(_facts.gather())")
        assert "'deepspeed_hook': False" in output
    finally:
        (environment.site / hook.FILE_NAME).rmdir()


def test_a_path_that_is_not_unicode_is_shown(tmp_path: Path) -> None:
    site = tmp_path / os.fsdecode(b"gr\xf6\xdfe\x1b[31m")
    site.mkdir()
    code = f"""
from pathlib import Path
from forebay.deepspeed import hook
for json in (False, True):
    hook.run("enable", json=json, site=Path({str(site)!r}))
"""
    output = run("-c", code)
    assert "\x1b" not in output
    state = json.loads(output[output.index("{") :])
    assert state["files"][0].encode().decode().endswith(hook.FILE_NAME)


def test_an_environment_that_cant_be_written_is_exit_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none"
    assert hook.run("enable", site=missing) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert str(missing) in captured.err
    assert hook.run("disable", site=missing) == 0
    with pytest.raises(ValueError, match="status"):
        hook.run("restart")


def test_the_command_does_it(environment: Environment) -> None:
    command = ("-m", "forebay", "deepspeed")
    assert "is on" in environment.run(*command, "enable")
    state = json.loads(environment.run(*command, "status", "--json"))
    assert state["enabled"] is state["works"] is True
    assert "is off" in environment.run(*command, "disable")
    assert not (environment.site / hook.FILE_NAME).exists()


def test_a_broken_pipe_is_silent(environment: Environment) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "from forebay.deepspeed import hook; raise SystemExit(hook.run('status'))"
    with open(writing, "wb") as stream:
        done = subprocess.run(
            [environment.python, "-c", code],
            stdout=stream,
            stderr=subprocess.PIPE,
            check=True,
            timeout=60,
        )
    assert done.stderr == b""


def test_a_site_without_deepspeed_is_a_problem(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv", with_packages=False)
    # Forebay alone.
    (environment.site / "forebay").symlink_to(Path(forebay.__file__).parent)
    assert "DeepSpeed isn't installed" in environment.hook("enable", expected=1)


SCRIPT = """
import os, sys
def fail():
    raise ValueError("from the script")
print(sys.argv, sys.path, __name__, __file__, __spec__ and __spec__.name, sys.flags)
print(sys.modules["__main__"].__dict__ is globals())
sys.stdout.flush()
if sys.argv[1:] == ["fail"]:
    fail()
if sys.argv[1:] == ["kill"]:
    os.kill(os.getpid(), 15)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["{script}", "0"], 0),
        (["{script}", "7"], 7),
        (["{script}", "fail"], 1),
        (["{script}", "kill"], -15),
        (["{folder}", "3"], 3),
        (["-m", "script", "5"], 5),
        (["-OO", "-W", "error", "-X", "dev", "{script}", "0"], 0),
        (["-c", "import sys; print(sys.argv, sys.path); sys.exit('bye')", "a", "-b"], 1),
        (["{folder}/missing.py"], 2),
        (["-m", "missing"], 1),
    ],
)
def test_a_program_runs_as_by_python_itself(
    tmp_path: Path, arguments: list[str], code: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "__main__.py").write_text(SCRIPT)
    filled = [text.format(script=script, folder=tmp_path) for text in arguments]
    more = {"PYTHONPATH": str(tmp_path)}
    plain = Program(*filled, **more).finish(code)
    assert Program(*FOREBAY, *filled, **more).finish(code) == plain
    assert plain


def test_options_before_the_module_are_passed_on() -> None:
    show = ("-c", "import sys; print(sys.flags.optimize, sys.stdout.write_through)")
    buffered = {"PYTHONUNBUFFERED": ""}
    assert run("-O", "-u", *FOREBAY, *show, **buffered) == "1 True\n"
    assert run(*FOREBAY, "-u", *show, **buffered) == "0 True\n"
    assert run(*FOREBAY, *show, **buffered) == "0 False\n"


def test_the_users_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.users = __file__\n")
    code = (
        "import sitecustomize, sys; print(users, sitecustomize.__file__, sys.meta_path[0].__name__)"
    )
    own = str(tmp_path / "sitecustomize.py")
    assert run(*FOREBAY, "-c", code, PYTHONPATH=str(tmp_path)) == f"{own} {own} ForebayTrigger\n"
    (tmp_path / "sitecustomize.py").write_text("import nothing_of_that_name\n")
    output = run(*FOREBAY, "-c", "print('started')", PYTHONPATH=str(tmp_path))
    assert output.endswith("started\n")
    assert "nothing_of_that_name" in output


def test_what_cant_be_passed_on_is_refused_by_name() -> None:
    assert "usage" in run(*FOREBAY, "--help")
    assert "usage" in run(*FOREBAY, expected=2)
    for option in ("-I", "-E"):
        assert "-I, -E or -S" in run(option, *FOREBAY, "-c", "pass", expected=3)
