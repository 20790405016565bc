"""What a process of many checks and decides; with eight devices in one process. Real processes: processes_test.py."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from deepinit.sharding import make_mesh
from deepinit.train import distributed
from deepinit.train.config import load


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 2, "fsdp": 4})


def split(mesh, tamper=None):
    """A leaf split four ways with two copies of each part, one of them tampered with."""
    layout = NamedSharding(mesh, PartitionSpec("fsdp"))
    x = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), layout)
    parts = [np.array(shard.data) for shard in x.addressable_shards]
    if tamper is not None:
        parts[tamper][1, 2] = np.nextafter(parts[tamper][1, 2], np.float32(100))
    devices = [shard.device for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, layout, list(map(jax.device_put, parts, devices)))


def test_equal_replicas(mesh):
    whole = jax.device_put(np.float32(3), NamedSharding(mesh, PartitionSpec()))
    distributed.check_replicas({"attn_q": split(mesh), "attn_residual_gate": whole}, mesh)


# case B50
def test_a_replica_that_differs_in_one_bit_is_named(mesh):
    with pytest.raises(RuntimeError, match=r"^attn_q: the copies on device 1 .* and device 5 .* differ before step 1$"):
        distributed.check_replicas({"attn_q": split(mesh, tamper=5)}, mesh)


def test_facts_name_every_setting():
    one, two = (distributed.facts(load([], ["--train.seed", seed])) for seed in "01")
    assert [k for k in one if one[k] != two[k]] == ["train.seed"]
    assert one["jax_default_prng_impl"] == "threefry2x32"
    assert len(one["source code of deepinit"]) == 64


def test_alone_everything_is_agreed(mesh):
    assert distributed.first()
    assert distributed.from_first("runs/ü") == "runs/ü"
    assert distributed.everywhere(True)
    assert not distributed.everywhere(False)
    distributed.same("the text", "x")
    ballot = distributed.Ballot(mesh)
    assert (ballot.cast(15), ballot.now(15)) == (15, 15)


def test_the_work_of_one_process():
    assert distributed.run(distributed.Start(cluster="none"), load(), lambda beat: beat("x") or 7) == 7
