"""Puts the servers that PyPI's packages in the `dev` extra do not bring into `.servers/`: run by `make servers`.

Azurite comes from npm, and pyright, which checks types beside mypy. gcp-storage-emulator, which stands for a store that
ignores preconditions, and MLflow's server get an environment each, because what they need is older than what ckptstore
is tested with. Prometheus, which reads our metrics, is Debian's package, unpacked and not installed. Training
frameworks lie in a folder each, which tests put behind the packages of `.venv`: what else they need is there, or is not
used. What is there already is left alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import debian

SERVERS = Path(__file__).resolve().parents[2] / ".servers"
NPM = {"azurite": "3.37.0", "pyright": "1.1.414"}
GCP_STORAGE_EMULATOR = (
    "gcp-storage-emulator==2026.7.19",
    "google-crc32c==1.9.0",
    "setuptools<81",  # it imports pkg_resources
)
MLFLOW = ("mlflow==3.17.2",)
TORCHTITAN = (  # without what it wants for Hugging Face's datasets, which its tests do not use
    "docstring_parser==0.18.0",
    "einops==0.8.2",
    "spmd_types==0.2.3",
    "tensorboard==2.21.0",
    "torchtitan==0.3.0",
    "typeguard==4.6.0",
    "tyro==1.0.17",
)
TRL = ("trl==1.16.0", "datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19")
DEEPSPEED = ("deepspeed==0.19.8", "einops==0.8.2", "hjson==3.1.0", "ninja==1.13.2", "py-cpuinfo==9.0.0")
KERAS = ("keras==3.15.1", "h5py==3.16.0", "namex==0.1.0", "optree==0.20.0")
IGNITE = ("pytorch-ignite==0.5.5",)
STABLE_BASELINES3 = ("stable-baselines3==2.9.2", "farama-notifications==0.0.6", "gymnasium==1.4.0")
COQUI = ("coqui-tts-trainer==0.4.0", "coqpit-config==0.2.5", "tensorboard==2.21.0")
COMPOSER = (  # most of these are for mcli, which it imports
    "argcomplete==3.7.2",
    "arrow==1.4.0",
    "backoff==2.2.1",
    "coolname==5.0.0",
    "gql==3.5.3",
    "graphql-core==3.2.14",
    "mosaicml==0.32.1",
    "mosaicml-cli==0.7.5",
    "prompt_toolkit==3.0.53",
    "py-cpuinfo==9.0.0",
    "pytorch-ranger==0.1.1",
    "questionary==2.0.1",
    "ruamel.yaml==0.19.1",
    "tabulate==0.10.0",
    "termcolor==3.3.0",
    "torch_optimizer==0.3.0",
    "torchvision==0.28.0",  # what is Python of it: see tests/run/trainers/without_operators.py
    "validators==0.36.0",
    "wcwidth==0.9.4",
    "websockets==17.4",
)
FVCORE = (
    "fvcore==0.1.5.post20221221",
    "iopath==0.1.10",
    "portalocker==4.4.2",
    "tabulate==0.10.0",
    "termcolor==3.3.0",
    "yacs==0.1.8",
)
MMENGINE = (
    "mmengine-lite==0.10.7",
    "addict==2.4.0",
    "opencv-python-headless==5.0.0.93",
    "termcolor==3.3.0",
    "yapf==0.43.0",
)
AXOLOTL = ("axolotl==0.19.0", "peft==0.21.2", "addict==2.4.0")  # the plugins; its other parts need GPUs
ULTRALYTICS = (
    "ultralytics==8.4.190",
    "opencv-python-headless==5.0.0.93",
    "polars==2.1.0",
    "polars-runtime-32==2.1.0",
    "torchvision==0.28.0",
    "ultralytics-thop==2.2.3",
)

LIGHTGBM = ("lightgbm==4.7.0",)
SPACY = (
    "spacy==3.8.18",
    "blis==1.3.4",
    "catalogue==2.0.10",
    "cloudpathlib==0.26.0",
    "confection==1.3.4",
    "cymem==2.0.16",
    "murmurhash==1.0.16",
    "preshed==3.0.15",
    "smart-open==9.0.2",
    "spacy-legacy==3.0.12",
    "spacy-loggers==1.0.5",
    "srsly==2.5.6",
    "thinc==8.3.14",
    "wasabi==1.1.3",
    "weasel==1.0.1",
)
TIMM = ("timm==1.0.31", "torchvision==0.28.0")  # the one for GPUs: no operator of it can be used
XGBOOST = ("xgboost-cpu==3.2.0",)
CWTRAIN = ("--ignore-requires-python", "cwtrain==1.0.2")  # what is read of it runs on 3.11 too


ONLY_LONG = {
    "composer": COMPOSER,
    "coqui": COQUI,
    "fvcore": FVCORE,
    "ignite": IGNITE,
    "lightgbm": LIGHTGBM,
    "mmengine": MMENGINE,
    "spacy": SPACY,
    "stable-baselines3": STABLE_BASELINES3,
    "timm": TIMM,
    "trl": TRL,
    "ultralytics": ULTRALYTICS,
}
"""What only tests of `make test-long` use."""


def main() -> int:
    SERVERS.mkdir(exist_ok=True)
    failed = max(
        install_from_npm(),
        install_environment("gcp-storage-emulator", GCP_STORAGE_EMULATOR),
        install_environment("mlflow", MLFLOW),
        install_beside("torchtitan", TORCHTITAN),
        install_beside("deepspeed", DEEPSPEED),
        install_beside("axolotl", AXOLOTL),
        install_beside("xgboost", XGBOOST),
        install_beside("keras", KERAS),
        install_beside("cwtrain", CWTRAIN),
        install_prometheus(),
        *(install_beside(name, packages) for name, packages in ONLY_LONG.items() if "--all" in sys.argv),
    )
    return failed if os.environ.get("CI") else 0  # elsewhere the tests are skipped, and say why


def install_from_npm() -> int:
    modules = SERVERS / "node_modules"
    there = {name: modules / name / "package.json" for name in NPM}
    if all(path.exists() and json.loads(path.read_text())["version"] == NPM[name] for name, path in there.items()):
        return 0
    npm = shutil.which("npm")
    if npm is None:
        print(f"npm is not installed: the tests that need {' or '.join(NPM)} cannot run", file=sys.stderr)
        return 1
    (SERVERS / "package.json").write_text('{"private": true}\n')
    packages = [f"{name}@{version}" for name, version in NPM.items()]
    command = [npm, "install", *packages, "--no-audit", "--no-fund", "--save-exact", "--loglevel=error"]
    return subprocess.run(command, cwd=SERVERS, check=False).returncode


def install_environment(name: str, packages: tuple[str, ...]) -> int:
    """An environment of Python with these packages and no others."""
    home = SERVERS / name
    done = home / ".installed"
    if done.exists() and done.read_text() == repr(packages):
        return 0
    subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
    pip = [home / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    returncode = subprocess.run([*pip, *packages], check=False).returncode
    if returncode == 0:
        done.write_text(repr(packages))
    return returncode


def install_beside(name: str, packages: tuple[str, ...]) -> int:
    """A folder with these packages and nothing that they need, for PYTHONPATH or the end of `sys.path`."""
    home = SERVERS / name
    done = home / ".installed"
    if done.exists() and done.read_text() == repr(packages):
        return 0
    shutil.rmtree(home, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    returncode = subprocess.run([*pip, "--no-deps", "--target", home, *packages], check=False).returncode
    if returncode == 0:
        done.write_text(repr(packages))
    return returncode


def install_prometheus() -> int:
    home = SERVERS / "prometheus"
    if (home / "root/usr/bin/prometheus").exists():
        return 0
    if missing := debian.lacking():
        print(f"There is no {missing[0]}: the tests that need Prometheus cannot run", file=sys.stderr)
        return 1
    try:
        debian.unpacked(("prometheus",), home)
    except subprocess.CalledProcessError as error:
        print(f"Prometheus cannot be downloaded, so its tests cannot run: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
