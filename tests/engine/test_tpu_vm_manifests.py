"""The manifests for GKE, by the schemas of Kubernetes themselves, for every generation."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

import validators_support
from process_support import call
from tpu_vm_support import DIGEST, FOLDER, IMAGE, program

gke = program("gke-manifest")
LABELS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
SLICES = [
    # generation, topology, hosts, chips of each
    ("v4", "2x2x1", 1, 4),
    ("v4", "2x2x4", 4, 4),
    ("v5e", "1x1", 1, 1),
    ("v5e", "2x2", 1, 4),
    ("v5e", "2x4", 1, 8),
    ("v5e", "4x8", 8, 4),
    ("v5p", "2x2x1", 1, 4),
    ("v5p", "4x4x4", 16, 4),
    ("v6e", "1x1", 1, 1),
    ("v6e", "2x4", 1, 8),
    ("v6e", "16x16", 64, 4),
    ("tpu7x", "2x2x1", 1, 4),
    ("tpu7x", "2x2x2", 2, 4),
]
VERSIONS = ("1.29", "1.33", "1.37")
COMMAND = [
    "python",
    "train.py",
    "--rate=1e-3",
    "yes",
    "1",
    "",
    "a: b # c",
    "- x\ty",
    "null",
    "é'\"",
    "\U0001f680 \u2028 \x85 \x7f",
    "$(x) `x` ${x}",
    "a: b\n- c: {d}",
    "x" * 5000,
]

_JUDGE = """
import json, kubernetes_validate, yaml
given = json.load(sys.stdin)
said = []
for text, wanted in given["files"]:
    documents = list(yaml.safe_load_all(text))
    if documents != wanted:
        said.append(["YAML", text])
    for document in documents:
        if document["kind"] == "JobSet":
            # its Jobs are of the schema of Jobs
            for one in document["spec"]["replicatedJobs"]:
                spec = one["template"]["spec"]
                job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
                documents.append({**job, "spec": spec})
            continue
        for version in given["versions"]:
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                said.append([version, document["kind"], error.message])
print(json.dumps(said))
"""


def judge(files: list[tuple[str, list[dict[str, Any]]]]) -> list[list[str]]:
    """What the schemas say against files: their text, and what should be in it."""
    data = json.dumps({"files": files, "versions": VERSIONS})
    said: list[list[str]] = json.loads(validators_support.run(_JUDGE, data))
    return said


def text_of(documents: list[dict[str, Any]]) -> str:
    return "\n".join("---\n" + "\n".join(gke.lines(one)) for one in documents)


def made(kind: str, generation: str, topology: str, *options: str) -> list[dict[str, Any]]:
    words = [kind, generation, topology, "--image", IMAGE, *options]
    documents: list[dict[str, Any]] = gke.manifests(gke.parse(words))
    return documents


def test_every_manifest_is_valid_and_says_what_it_should() -> None:
    files = []
    for kind in ("job", "jobset"):
        for generation, topology, hosts, chips in SLICES:
            more = ("--slices", "2") if kind == "jobset" else ()
            own = ("--cache-claim", "compiled", "--service-account", "trainer")
            documents = made(kind, generation, topology, *more, *own, "--", *COMMAND)
            files.append((text_of(documents), documents))
            last = documents[-1]
            job = last["spec"]
            if kind == "jobset":
                assert last["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
                assert set(job) == {"network", "failurePolicy", "replicatedJobs"}
                (one,) = job["replicatedJobs"]
                assert one["replicas"] == 2
                job = one["template"]["spec"]
            assert (job["completions"], job["parallelism"]) == (hosts, hosts)
            pod = job["template"]["spec"]
            assert pod["nodeSelector"] == {
                "cloud.google.com/gke-tpu-accelerator": LABELS[generation],
                "cloud.google.com/gke-tpu-topology": topology,
            }
            (main,) = pod["containers"]
            assert main["args"] == COMMAND
            assert main["resources"]["limits"] == main["resources"]["requests"]
            assert main["resources"]["limits"] == {"google.com/tpu": chips}
            (health,) = pod["initContainers"]
            assert ("device" in health["args"][-1]) == (hosts == 1) == ("resources" in health)
            assert pod["securityContext"]["runAsNonRoot"] is True
            for container in (main, health):
                assert container["image"] == IMAGE
                assert "command" not in container
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }
            # the hosts of a slice have to find each other
            assert len(documents) == (2 if kind == "job" and hosts > 1 else 1)
            if len(documents) == 2:
                assert documents[0]["spec"]["selector"] == {"job-name": "tpu"}
                assert pod["subdomain"] == documents[0]["metadata"]["name"]
    root = made("job", "v6e", "2x2", "--as-root")
    files.append((text_of(root), root))
    pod = root[0]["spec"]["template"]["spec"]
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == (
        0,
        False,
    )
    rights = pod["containers"][0]["securityContext"]["capabilities"]
    assert rights == {"drop": ["ALL"], "add": ["SYS_RESOURCE"]}
    assert judge(files) == []


def test_the_judge_can_say_no() -> None:
    wrong = made("job", "v6e", "2x2")
    wrong[0]["spec"]["template"]["spec"]["containers"][0]["privileged"] = True
    wrong_set = made("jobset", "v6e", "2x2")
    inner = wrong_set[0]["spec"]["replicatedJobs"][0]["template"]["spec"]
    inner["completions"] = "many"
    said = judge([(text_of(wrong), wrong), (text_of(wrong_set), wrong_set)])
    assert [one[0] for one in said] == [*VERSIONS, *VERSIONS]
    assert "privileged" in said[0][2]
    assert "many" in said[3][2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("job", "v6e", "2x2x1"), "v6e has 2 axes, as in 2x2, not 2x2x1"),
        (("job", "v5p", "2x2"), "v5p has 3 axes"),
        (("job", "v5p", "2x0x1"), "is not a topology"),
        (("job", "v5e", "3x5"), "v5e has no topology 3x5: 1x1, 2x2"),
        (("job", "v6e", "2x3"), "v6e has no topology 2x3"),
        (("job", "v6e", "999x999"), "v6e has no topology 999x999"),
        (("job", "v5p", "4x2x2"), "v5p has no topology 4x2x2: 2x2x1, or sides"),
        (("job", "v4", "16x16x20"), "v4 has no topology 16x16x20"),
        (("job", "v5e", "2x2", "--chips-per-host", "8"), "4 chips, which are no hosts of 8"),
        (("job", "v6e", "2x2\n"), "is not a topology"),
        (("job", "v6e", "2x2", "--cache-claim", ""), "--cache-claim '': no name of an object"),
        (("job", "v6e", "2x2", "--service-account", "a\nb: c"), "--service-account 'a\\nb: c'"),
        (("job", "v6e", "2x2", "--image", f"$(x)@{DIGEST}"), "--image …"),
        (("job", "v6e", "2x2", "--image", f'a"b: c@{DIGEST}'), "--image …"),
        (("job", "v6e", "2x2", "--image", f"{IMAGE}\n"), "--image …"),
        (("job", "v6e", "2x2", "--image", IMAGE, "--", "\udcff"), "no text in UTF-8"),
        (("job", "v3", "2x2"), "invalid choice"),
        (("job", "v6e", "2x2", "--slices", "2"), "--slices needs a jobset"),
        (("job", "v6e", "2x2", "--name", "My_Job"), "--name My_Job"),
        (("job", "v6e", "2x2", "--image", "runtime:0.2"), "a tag can move"),
    ],
)
def test_what_makes_no_sense_is_2(words: tuple[str, ...], says: str) -> None:
    image = () if "--image" in words else ("--image", IMAGE)
    done = call([sys.executable, "-B", str(FOLDER / "gke-manifest"), *words, *image], timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr
