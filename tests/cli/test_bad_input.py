"""Bad input: one line on stderr that names value and remedy, exit code 2, no traceback.

A few tests start processes; the others run the commands in this one.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, CompletedProcess, run

import pytest

from tests.support.commands import TUNEGEMM, here, process
from tests.support.processes import environment
from tunegemm.describe.device import cuda_device_count
from tunegemm.store import Database

SHAPE = ("--shape", "64x64x64")


def refused(*arguments: str | Path, run: Callable[..., CompletedProcess[str]] = here) -> str:
    """The one line that a refusal prints."""
    done = run(*arguments, code=2)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("tunegemm: ")
    return line


@pytest.mark.slow
def test_in_a_process(tmp_path: Path) -> None:
    """As the program's own: its exit code, and nothing of an interpreter that ends beside its line."""
    assert "device 'cuda:77': " in refused("tune", *SHAPE, "--device", "cuda:77", run=process)
    path = tmp_path / "tuning.sqlite"
    path.write_bytes(b"this was never a database " * 400)
    assert str(path) in refused("history", *SHAPE, "--db", path, run=process)


@pytest.mark.parametrize("command", ["tune", "space"])
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--shape", "0x4x4"), "m=0 in 0x4x4: every extent must be from 1 to 2147483647"),
        (("--shape", "4096"), "shape '4096' is not MxNxK or MxNxKxL; for example 4096x4096x4096"),
        (("--shape", f"{'9' * 5000}x1x1"), "is not MxNxK"),
        (("--shape", "64x64x64", "--shape", "9x9"), "shape '9x9' is not"),
        ((*SHAPE, "--dtype", "int4"), "dtype 'int4' is not known; use one of bf16, fp16, tf32, fp8_e4m3"),
        ((*SHAPE, "--dtype", "fp32"), "input dtype 'fp32' has no kernels; fp32 operands have kernels"),
        ((*SHAPE, "--out-dtype", "int4"), "dtype 'int4' is not known"),
        ((*SHAPE, "--layout", "rc"), "layout 'rc' is not known; use one of tn, tt, nn, nt"),
        ((*SHAPE, "--device", "tpu:0"), "device 'tpu:0' is not known; use cuda:N, replay:NAME or model:NAME"),
        ((*SHAPE, "--device", "cuda:77"), "device 'cuda:77': "),
        ((*SHAPE, "--device", "model:gtx970"), "device 'model:gtx970': no such part"),
        ((*SHAPE, "--shap", "1x1x1"), "No such option: --shap"),
    ],
)
def test_arguments(command: str, arguments: tuple[str, ...], named: str) -> None:
    assert named in refused(command, *arguments)


@pytest.mark.parametrize("command", ["tune", "space"])
def test_a_product_that_no_memory_holds(command: str) -> None:
    huge = "x".join(["2000000000"] * 3)
    # Before the first shape is tuned.
    line = refused(command, *SHAPE, "--shape", huge, "--device", "model:h200")
    assert (
        f"{huge} bf16 tn: operands and output of 2.4e+10 GB > 141 GB of NVIDIA H200; give a smaller" in line
    )


def test_no_shape() -> None:
    assert "give either --shape or --from" in refused("tune")
    assert "Missing option '--shape'" in refused("space")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--effort", "heroic"), "'heroic' is not one of 'quick', 'full', 'exhaustive'"),
        (("--trials", "0"), "--trials 0: must be 1 or more"),
        (("--trials", "many"), "--trials"),
        (
            ("--sampler", "luck"),
            "sampler 'luck': use roofline, tpe, gp, random, cmaes or package.module:Class",
        ),
        (("--sampler", "no.such:Class"), "importing no.such fails"),
        (("--sampler", "collections:OrderedDict"), "OrderedDict is not a sampler"),
        (("--study", "."), "study .: a folder; give a file in it"),
        (("--study", "nonsense://x"), "study nonsense://"),
        (("--workers", "-1"), "--workers -1: must be 1 or more"),
        (("--budget", "soon"), "budget 'soon' is not a duration; for example 90, 90s, 10m or 1h30m"),
        (("--budget", "9" * 5000), "not a duration"),
        (("--budget", "0"), "--budget '0' is not a duration"),
        (("--families", "cutlas"), "kernel family 'cutlas' is not known; use one of cute_sm90"),
        (("--families", ","), "families ',' names no family"),
    ],
)
def test_arguments_of_tune(arguments: tuple[str, ...], named: str) -> None:
    assert named in refused("tune", *SHAPE, *arguments)


@pytest.mark.parametrize(
    ("candidate", "named"),
    [
        ("cute_sm90,schedule=foo", "cute_sm90: schedule=foo; use one of cooperative, pingpong"),
        ("triton_tma,schedule=foo", "use one of pipelined, flattened"),
        ("cute_sm90,swap_ab=maybe", "swap_ab=maybe; use true or false"),
        ("gluon_wgmma,tile_m=0", "gluon_wgmma: tile_m=0; use a whole number from 1 to 2147483647"),
        ("cute_sm90,tile_m=x", "tile_m=x; use a whole number from 1"),
        ("cute_sm90,tile_m=64,tile_m=128", "gives a parameter twice; give each once"),
        ("cute_sm90,stages=-1", "stages=-1; use a whole number from 1"),
        ("cute_sm90,swizzle_size=0", "swizzle_size=0; use a whole number from 1"),
        ("cute_sm90,cluster_m=true", "cluster_m=true; use a whole number from 1"),
        ("cute_sm90,epi_n=-16", "epi_n=-16; use a whole number from 0"),
        ("cute_sm80,split_k=\N{SUPERSCRIPT TWO}", "split_k=\N{SUPERSCRIPT TWO}; use a whole number"),
        ("cute_sm80,foo=1", "no parameter 'foo'"),
        ("cute_sm80,foo", "not NAME=VALUE"),
        ("x", "'x' is not known"),
    ],
)
def test_values_of_a_candidate(candidate: str, named: str) -> None:
    assert named in refused("explain", *SHAPE, "--device", "model:h200", "--candidate", candidate)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tune", "--seed", "-1"), "'-1'"),
        (("tune", "--trials", "abc"), "'abc'"),
        (("tune", "--effort", "hard"), "'hard' is not one of"),
        (("tune", "--bogus"), "No such option: --bogus"),
        (("db", "export", "--bogus"), "No such option: --bogus"),
    ],
)
def test_usage_errors_name_the_value_and_the_commands_own_help(arguments: tuple[str, ...], said: str) -> None:
    line = refused(*arguments)
    command = " ".join(word for word in arguments[:2] if word[0] != "-")
    assert said in line and line.endswith(f". See `tunegemm {command} --help`.")
    assert "Value error" not in line and ".." not in line


def test_a_shape_without_its_option() -> None:
    line = refused("tune", "512x6144x4096")
    assert "give the shape as --shape 512x6144x4096. See" in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_an_output_that_is_full_is_named() -> None:
    with Path("/dev/full").open("w") as full:
        command = [*TUNEGEMM, "shapes", "--help"]
        done = run(command, env=environment(), stdout=full, stderr=PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "tunegemm: the output: No space left on device\n")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--devices", "0,1,0"), "--devices '0,1,0': names GPU 0 twice; name each once"),
        (("--devices", "0;1"), "--devices '0;1': not GPU numbers; give all, or numbers such as 0,1"),
        (("--devices", "9" * 5000), "not GPU numbers; give all"),
        (("--device", "cuda:" + "9" * 5000), "use cuda:N with a number"),
        (("--ray", "h:" + "9" * 5000), "not HOST:PORT"),
        (("--ray", ":6379"), "Ray address ':6379': not HOST:PORT"),
        (("--devices", ""), "--devices '': not GPU numbers; give all, or numbers such as 0,1"),
        (("--devices", "0,1", "--ray"), "--devices and --ray: give one of them"),
        (("--device", "cuda:0", "--devices", "all"), "--device and --devices: give one of them"),
        (("--ray", "ray://head:10001"), "Ray address 'ray://head:10001': not HOST:PORT, such as"),
        (
            ("--ray", "127.0.0.1:1"),
            "Ray address '127.0.0.1:1' does not answer (Connection refused); start it with",
        ),
    ],
)
def test_gpus_and_clusters_that_are_not_there(given: tuple[str, ...], said: str) -> None:
    assert said in refused("tune", *SHAPE, *given)


def test_a_gpu_that_is_not_there() -> None:
    count = cuda_device_count()
    remedy = f"this host has GPUs 0 to {count - 1}" if count else "no CUDA device here"
    assert remedy in refused("tune", *SHAPE, "--devices", "0,99")


def without_gpu(*arguments: str | Path, code: int) -> CompletedProcess[str]:
    """Where there is a GPU, in a process that sees none."""
    if not cuda_device_count():
        return here(*arguments, code=code)
    return process(*arguments, code=code, env=environment(CUDA_VISIBLE_DEVICES=""))


def test_ray_without_an_address_or_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    line = refused("tune", *SHAPE, "--ray", run=without_gpu)
    assert "--ray without an address or RAY_ADDRESS: no CUDA device here" in line


@pytest.mark.slow
def test_a_service_at_rays_address_that_says_nothing() -> None:
    """Ray would wait for ever. In a process of its own, which ends although that goes on."""
    program = (
        "import sys; from tunegemm.tuning import cluster; cluster._CONNECT_S = 2.0; "
        "from tunegemm.cli import main; main()"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        words = [sys.executable, "-c", program, "tune", *SHAPE, "--ray", address]
        done = run(words, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, done
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        f"tunegemm: Ray address '{address}' accepts a connection, but Ray does not answer within 2 s"
    )


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'tunegemm[ray]'" in refused("tune", *SHAPE, "--ray", "127.0.0.1:1")


def test_exports_are_json(tmp_path: Path) -> None:
    for command in (("export", "--out"), ("import",)):
        for name in ("all.csv", "all.parquet"):
            assert "leaderboard --format csv" in refused("db", *command, tmp_path / name)


@pytest.mark.parametrize("out", ["", "nowhere/x.pack"])
def test_a_pack_that_cannot_be_written_is_refused_before_it_is_made(tmp_path: Path, out: str) -> None:
    with Database.open():  # else a line says that there is none
        pass
    line = refused("pack", "--out", tmp_path / out)  # which else compiles a hundred kernels first
    assert "Is a directory; give a file in it" in line or "No such file or directory" in line


def test_devices_without_a_name() -> None:
    """As of a variable of the shell that is not set."""
    for command in (("space", *SHAPE), ("explain", *SHAPE), ("tune", *SHAPE), ("verify",)):
        assert "device '' is not known; use cuda:N" in refused(*command, "--device", "")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--predicted",), "name products by either --shape 8x9216x4608 or --from shapes.json"),
        (("--predicted", *SHAPE, "--from", "x.json"), "name products by either --shape"),
        (("--predicted", "--shape", "8x9"), "shape '8x9' is not MxNxK"),
        (("--predicted", "--from", "nowhere.json"), "nowhere.json"),
        (("--predicted", *SHAPE, "--all"), "--predicted and --all: give one of them"),
        (("--from", "x.json"), "--from x.json: works with --predicted only; select records with --shape"),
        (("--predicted", *SHAPE, "--device", "replay:h200"), "measures nothing, and this needs measurements"),
        (("--predicted", *SHAPE, "--device", "cuda:77"), "device 'cuda:77': "),
        (("--predicted", "--shape", "{8,16}x64x64", "--device", "replay:h200"), "measures nothing"),
    ],
)
def test_verifying_predictions(arguments: tuple[str, ...], named: str) -> None:
    assert named in refused("verify", *arguments)


def test_predictions_are_not_verified_without_a_gpu() -> None:
    line = refused("verify", "--predicted", *SHAPE, run=without_gpu)
    assert "no CUDA device here, and this measures; run it on a GPU" in line


@pytest.mark.parametrize("digest", ["", "zz", "9" * 5000])
def test_a_hash_that_is_none(tmp_path: Path, digest: str) -> None:
    (tmp_path / "x").touch()
    assert "give its 64 hexadecimal digits" in refused("load", tmp_path / "x", "--sha256", digest)


def test_no_such_command() -> None:
    assert "No such command 'tun'" in refused("tun")


class TestDatabase:
    """The same for a command that writes and for one that reads."""

    @pytest.fixture(
        params=[("tune", *SHAPE, "--device", "model:h200"), ("history", *SHAPE)], ids=["tune", "read"]
    )
    def command(self, request: pytest.FixtureRequest) -> tuple[str, ...]:
        chosen: tuple[str, ...] = request.param
        return chosen

    def test_corrupt(self, command: tuple[str, ...], tmp_path: Path) -> None:
        path = tmp_path / "tuning.sqlite"
        path.write_bytes(b"this was never a database " * 400)
        line = refused(*command, "--db", path)
        assert str(path) in line and ";" in line
        assert path.read_bytes() == b"this was never a database " * 400, (
            "a foreign file must be left as it is"
        )

    def test_folder(self, command: tuple[str, ...], tmp_path: Path) -> None:
        assert f"{tmp_path}: a folder, not a database file" in refused(*command, "--db", tmp_path)

    def test_environment_variable_is_named_by_its_value(
        self, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if command[0] == "tune":
            command = (*command, "--db", str(tmp_path))  # a modelled tuning opens only a database it is given
        monkeypatch.setenv("TUNEGEMM_DB", str(tmp_path))
        assert str(tmp_path) in refused(*command)


def test_read_only_place(tmp_path: Path) -> None:
    # Permissions do not bind root, but nobody creates files in /proc.
    folder = tmp_path if os.geteuid() else Path("/proc")
    folder.chmod(0o555)
    line = refused("tune", *SHAPE, "--device", "model:h200", "--db", folder / "tuning.sqlite")
    assert str(folder / "tuning.sqlite") in line


def test_leaderboard_of_nothing(tmp_path: Path) -> None:
    line = refused("leaderboard", "--db", tmp_path / "absent.sqlite")
    assert "absent.sqlite: no such database; `tunegemm tune` on a GPU creates it" in line
    assert not (tmp_path / "absent.sqlite").exists()
