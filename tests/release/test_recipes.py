"""The recipes in tools/recipes, as far as a machine without conda-forge, Docker or Kubernetes can run them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "tools/recipes"
TOOLS = ROOT / "build/release/tools/bin"
STORE = ROOT / "build/release/containers"
BASE, IMAGE = "docker.io/library/debian:bookworm-slim", "localhost/fompi-of-tests"

pytestmark = pytest.mark.timeout(1800)  # apt and pip download

AS_ROOT = () if os.geteuid() == 0 else ("sudo", "-n")
BUILDAH = (*AS_ROOT, "buildah", "--storage-driver", "vfs", "--root", STORE, "--runroot", STORE / "run")


def run(*command, fails=False, seconds=900):
    done = subprocess.run([*map(str, command)], cwd=ROOT, text=True, capture_output=True, timeout=seconds)
    assert bool(done.returncode) == fails, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def loaded(path):
    """A YAML file as a value."""
    convert = "import json, sys, yaml; print(json.dumps(yaml.safe_load(open(sys.argv[1]))))"
    return json.loads(run(TOOLS / "python", "-c", convert, path))


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the recipe builds on Python 3.11")
def test_the_recipe_of_conda(tmp_path, monkeypatch):
    """rattler-build builds and tests it, on stand-ins for conda-forge. Another field is refused."""
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONPATH", raising=False)  # the package is imported, not a checkout
    run(sys.executable, "-m", "venv", tmp_path / "env")
    run(tmp_path / "env/bin/python", "-m", "pip", "install", "-q", "setuptools>=77", "numpy", "mpi4py")
    recipe = RECIPES / "conda/recipe.yaml"
    script = (TOOLS / "python", Path(__file__).with_name("conda.py"))
    package = json.loads(run(*script, recipe, tmp_path / "env", tmp_path / "out").splitlines()[-1])
    assert {"python >=3.11", "numpy >=1.26", "mpi4py >=4.0"} <= {*package["depends"]}
    assert {"site-packages/fompi/native/_native.abi3.so", "python-scripts/fompi"} <= {*package["files"]}
    wrong = tmp_path / "recipe.yaml"
    wrong.write_text(recipe.read_text().replace("  number: 0", "  numbers: 0"))
    run(*script, wrong, tmp_path / "env", tmp_path / "out", fails=True)


@pytest.fixture(scope="module")
def image():
    """The image of the Dockerfile, on a fresh Debian in place of the one of the registry."""
    for program in ("buildah", "mmdebstrap"):
        assert shutil.which(program), f"needs {program}: apt-get install {program}"
    if BASE not in run(*BUILDAH, "images", "--format", "{{.Name}}:{{.Tag}}"):
        archive = ROOT / "build/release/debian.tar"
        run("mmdebstrap", "--quiet", "--variant=minbase", "bookworm", archive)
        name = run(*BUILDAH, "from", "scratch").strip()
        run(*BUILDAH, "add", name, archive, "/")
        if trusted := os.environ.get("PIP_CERT"):  # a proxy stands between this machine and the package index
            settings = ROOT / "build/release/pip.conf"
            settings.write_text("[global]\ncert = /trusted.crt\n")
            run(*BUILDAH, "add", name, trusted, "/trusted.crt")
            run(*BUILDAH, "add", name, settings, "/etc/pip.conf")
        run(*BUILDAH, "commit", "--rm", name, BASE)
        archive.unlink()
    dockerfile = RECIPES / "containers/Dockerfile"
    options = ("--isolation", "chroot", "--pull-never", "--ulimit", "nofile=1024:1024")
    run(*BUILDAH, "build", *options, "--tag", IMAGE, "--file", dockerfile, ".")
    yield IMAGE
    run(*BUILDAH, "rmi", IMAGE)


TWO_HOSTS = """
printf '127.0.0.2 h0\\n127.0.0.3 h1\\n' >> /etc/hosts
{server} & server=$!
sleep 1
{program}
status=$?
kill $server
exit $status
"""


def test_two_ranks_of_the_image_meet_by_ssh(tmp_path, image):
    """What compose.yaml says: the keys in their places, and the command of its head. One machine has both names."""
    page = RECIPES / "containers/compose.yaml"
    program = re.search(r"exec h0 (mpirun .*)", page.read_text())[1]
    host = loaded(page)["x-host"]
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key")
    files = {"key": tmp_path / "key", "public_key": tmp_path / "key.pub"}
    server = json.loads(run(*BUILDAH, "inspect", "--type", "image", image))["OCIv1"]["config"]["Cmd"]
    (tmp_path / "two.sh").write_text(TWO_HOSTS.format(server=" ".join(server), program=program))
    places = {tmp_path / "two.sh": "/two.sh"} | {files[s["source"]]: s["target"] for s in host["secrets"]}
    for file in files.values():  # as on a laptop: they are not root's
        run(*AS_ROOT, "chown", "1000:1000", file)
    name = run(*BUILDAH, "from", "--pull-never", image).strip()
    options = [word for file, place in places.items() for word in ("--volume", f"{file}:{place}:ro")]
    options += [word for pair in host["environment"].items() for word in ("--env", "=".join(pair))]
    inside = ("run", "--isolation", "chroot", "--hostname", "h0", *options, name, "sh", "/two.sh")
    alone = (*AS_ROOT, "unshare", "--net", "--fork", "--kill-child", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    try:
        output = run(*alone, *BUILDAH[len(AS_ROOT) :], *inside, seconds=120)
    finally:
        run(*BUILDAH, "rm", name)
    assert "launcher   hydra (2 processes)" in output and "engine     C," in output


@pytest.mark.parametrize(
    ("right", "wrong", "judge"),
    [
        ("", "", None),
        ("slotsPerWorker", "slotsPerWorkers", "check-jsonschema"),
        ("containers", "container", "kubernetes-validate"),
    ],
)
def test_the_job_of_kubernetes(tmp_path, right, wrong, judge):
    """The job fits its schema, and both pods that of Kubernetes. A misspelt name does not."""
    page, pod = tmp_path / "mpijob.yaml", tmp_path / "pod.yaml"
    page.write_text((RECIPES / "containers/mpijob.yaml").read_text().replace(right, wrong))
    schema = Path(__file__).with_name("mpijob.schema.json")
    run(TOOLS / "check-jsonschema", "--schemafile", schema, page, fails=judge == "check-jsonschema")
    for role, replicas in loaded(page)["spec"]["mpiReplicaSpecs"].items():
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": role.lower()}}
        pod.write_text(json.dumps({**template, "template": replicas["template"]}))
        run(TOOLS / "kubernetes-validate", "--strict", pod, fails=judge == "kubernetes-validate")
