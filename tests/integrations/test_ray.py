"""Test embedding on a Ray cluster of two nodes on this machine.

The files must equal those of a single process, even if a worker or a node is lost.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# If it is not imported here, its pytest plugin imports it at the end, while threads of Ray compile (CPython issue 106905).
import hypothesis  # noqa: F401
import numpy as np
import pytest

pytest.importorskip("ray.data", reason="needs ray[data]")
import psutil
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fqvit.errors import FqvitError
from fqvit.inference.folder import embed_folder
from fqvit.inference.model import ProgramModel
from fqvit.integrations.ray import Embedder, embed_shards
from tests.inference.pictures import TOKENS, expected_codes, folder_of, tar_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SHARDS, ROWS = 6, 700


def patiently(start: Callable[[], Any]) -> Any:
    """Start a node, in up to four attempts: Ray gives up after 30 seconds, and a busy machine may take longer."""
    for attempt in range(4):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error) or attempt == 3:
                raise
    raise AssertionError("unreachable")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = patiently(lambda: Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80_000_000}))
    patiently(lambda: found.add_node(num_cpus=1, object_store_memory=80_000_000))
    ray.init(address=found.address, logging_level="ERROR", log_to_driver=False)
    found.wait_for_nodes()
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with shards (`tars`) and with the embeddings that a single process computed from them (`one`)."""
    root = tmp_path_factory.mktemp("ray")
    for number in range(SHARDS):
        tar_of(root / "tars" / f"x-{number}.tar", range(number * ROWS, (number + 1) * ROWS))
    model = ProgramModel(TOKENS, threads=1)
    embed_folder(model, [root / "tars"], root / "one", model.chosen(None), "safetensors")
    return root


def assert_complete(out: Path, shards: Path) -> None:
    """Assert that every file equals that of a single process, and that nothing else is left."""
    names = sorted(path.name for path in (shards / "one").iterdir())
    assert sorted(os.listdir(out)) == names
    for name in names:
        assert (out / name).read_bytes() == (shards / "one" / name).read_bytes()


def workers_of(cluster: Cluster) -> list[psutil.Process]:
    """Return the processes of the cluster that are embedding shards."""
    found = []
    for node in cluster.list_all_nodes():
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        found += [child for child in raylet.children() if "ShardEmbedder" in " ".join(child.cmdline())]
    return found


def when_embedding(out: Path, act: Callable[[], object]) -> threading.Thread:
    """Call act() once some shards are complete and another one is in progress."""

    def watch() -> None:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            names = os.listdir(out) if out.exists() else []
            if any(name.endswith(".parts") for name in names) and any(name.startswith("x-") for name in names):
                act()
                return
            time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_two_nodes_write_the_same_files_as_one_process(cluster: Cluster, shards: Path, tmp_path: Path) -> None:
    words: dict[str, Any] = {"kind": "safetensors", "concurrency": 2}
    done = embed_shards(TOKENS, shards / "tars", tmp_path / "out", **words)
    assert (done.images, done.files, done.kept) == (SHARDS * ROWS, SHARDS, 0)
    assert done.names == [f"x-{number}.safetensors" for number in range(SHARDS)]
    assert_complete(tmp_path / "out", shards)
    (tmp_path / "out" / "x-3.safetensors").unlink()
    again = embed_shards(TOKENS, shards / "tars", tmp_path / "out", **words)
    assert (again.files, again.kept) == (SHARDS, SHARDS - 1)
    assert_complete(tmp_path / "out", shards)


def test_the_shard_of_a_killed_worker_is_embedded_again(cluster: Cluster, shards: Path, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill() -> None:
        victim = workers_of(cluster)[0]
        os.kill(victim.pid, signal.SIGKILL)
        killed.append(victim.pid)

    watcher = when_embedding(tmp_path / "out", kill)
    done = embed_shards(TOKENS, shards / "tars", tmp_path / "out", kind="safetensors", concurrency=2)
    watcher.join()
    assert killed
    assert (done.images, done.files) == (SHARDS * ROWS, SHARDS) and len(set(done.names)) == SHARDS
    assert_complete(tmp_path / "out", shards)


def test_an_embedder_can_be_a_step_of_a_pipeline(cluster: Cluster, tmp_path: Path) -> None:
    place = folder_of(tmp_path / "photos", 20)
    (place / "0" / "0004.png").write_text("no picture")
    dataset = ray.data.read_binary_files(str(place), include_paths=True)
    rows = dataset.map_batches(Embedder, fn_constructor_args=(str(TOKENS),), concurrency=1, batch_size=8).take_all()
    assert sorted(Path(row["path"]).name for row in rows) == [f"{number:04}.png" for number in range(20) if number != 4]
    codes = np.stack([row["tokens"] for row in rows])
    np.testing.assert_array_equal(codes, expected_codes([row["path"] for row in rows]))


def test_a_damaged_shard_is_named_and_the_other_shards_are_complete(cluster: Cluster, shards: Path, tmp_path: Path) -> None:
    with pytest.raises(FqvitError, match="no output 'mean'"):
        embed_shards(TOKENS, shards / "tars", tmp_path / "out", output="mean")
    tar_of(tmp_path / "tars" / "good.tar", range(5))
    (tmp_path / "tars" / "bad.tar").write_bytes(b"x" * 2000)
    with pytest.raises(FqvitError, match=r"bad.tar: no tar header.*1 of 2 files failed, the others are complete") as error:
        embed_shards(TOKENS, tmp_path / "tars", tmp_path / "out", kind="safetensors")
    assert "\n" not in str(error.value) and os.listdir(tmp_path / "out") == ["good.safetensors"]


def test_the_shards_of_a_lost_node_are_embedded_by_the_other_node(cluster: Cluster, shards: Path, tmp_path: Path) -> None:
    """Must be the last test: afterwards the cluster has one node. The first node is occupied until the second is lost."""
    here = NodeAffinitySchedulingStrategy(cluster.head_node.node_id, soft=False)
    occupant = ray.remote(Occupant).options(num_cpus=1, scheduling_strategy=here).remote()
    ray.get(occupant.ready.remote())
    (other,) = cluster.worker_nodes
    lost: list[str] = []

    def lose() -> None:
        cluster.remove_node(other, allow_graceful=False)
        lost.append(other.node_id)
        ray.kill(occupant)

    watcher = when_embedding(tmp_path / "out", lose)
    done = embed_shards(TOKENS, shards / "tars", tmp_path / "out", kind="safetensors", concurrency=2)
    watcher.join()
    assert lost
    assert (done.images, done.files) == (SHARDS * ROWS, SHARDS) and len(set(done.names)) == SHARDS
    assert_complete(tmp_path / "out", shards)


class Occupant:
    """An actor that does nothing."""

    def ready(self) -> bool:
        return True
