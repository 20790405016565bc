"""Where a process stands, from flags and from what launchers set."""

import http.server
import threading

import pytest

from deepinit.errors import ConfigError
from deepinit.train.cluster import Place, find, first_host

SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[007-008]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "2531262464.0;tcp://10.0.0.7,192.168.1.7:35291",
}
TPU_PODS = {
    "TPU_WORKER_HOSTNAMES": "a-0.a,a-1.a",
    "TPU_WORKER_ID": "1",
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2",
    "MEGASCALE_COORDINATOR_ADDRESS": "a-slice-0-0.a",
}
GPU_PODS = {"JAX_COORDINATOR_IP": "10.1.1.1", "JAX_COORDINATOR_PORT": "6002", "NNODES": "4", "NODE_RANK": "2"}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        (SLURM, Place("node007:61100", 4, 3, 1)),
        (OPENMPI, Place(f"10.0.0.7:{61_000 + 2531262464 % 4000}", 2, 1, None)),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, Place("127.0.0.1:63464", 2, 1, 0)),
        (TPU_PODS, Place("a-slice-0-0.a:8476", 6, 5)),
        (GPU_PODS, Place("10.1.1.1:6002", 4, 2)),
        (
            {"DEEPINIT_COORDINATOR": "h:1", "DEEPINIT_PROCESSES": "2", "DEEPINIT_PROCESS": "1", **SLURM},
            Place("h:1", 2, 1),
        ),
    ],
)
def test_what_launchers_set(env, place):
    assert find(env=env) == place


def test_flags_win_over_variables():
    assert find(coordinator="h:9", processes=5, process=4, env=SLURM) == Place("h:9", 5, 4)
    assert find(coordinator="h:9", env=OPENMPI) == Place("h:9", 2, 1)
    assert find(coordinator="h", processes=2, process=0, env={}) == Place("h:8476", 2, 0)


# case B79: a single process never tries to connect
@pytest.mark.parametrize(
    "env",
    [
        {},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script, which is no task
        {**OPENMPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        {"DEEPINIT_PROCESSES": "1", **SLURM},
    ],
)
def test_one_process_is_no_cluster(env):
    assert find(env=env) is None


def test_none_is_asked_for():
    assert find("none", env=SLURM) is None


@pytest.mark.parametrize(
    ("arguments", "env", "shown"),
    [
        ({"cluster": "slurn"}, {}, "did you mean 'slurm'"),
        ({"cluster": "slurm"}, OPENMPI, "its variables are not set here"),
        ({"processes": 2, "process": 2, "coordinator": "h:1"}, {}, "2 is not a number from 0 to 1"),
        ({"processes": 2, "process": 0}, {}, "'' is not HOST:PORT"),
        ({"coordinator": "h:1"}, {}, "--processes: a coordinator"),
        ({}, {"DEEPINIT_PROCESSES": "two"}, "DEEPINIT_PROCESSES: expected a whole number, got 'two'"),
    ],
)
def test_what_contradicts_itself(arguments, env, shown):
    with pytest.raises(ConfigError, match=shown):
        find(**arguments, env=env)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a", "a"), ("a,b", "a"), ("node[007-012,20],x", "node007"), ("n[3,5]-ib", "n3-ib"), ("n1.x.y", "n1.x.y")],
)
def test_slurms_lists_of_hosts(hosts, first):
    assert first_host(hosts) == first


def test_a_tpu_vm_asks_its_metadata_server():
    """A server of our own stands in for the one that every such machine has."""
    attributes = {
        "worker-network-endpoints": "a:1:10.0.0.5,b:2:10.0.0.6",
        "agent-worker-number": "1",
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.headers["Metadata-Flavor"] == "Google"
            found = attributes.get(self.path.rpartition("/")[2])
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write((found or "").encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        env = {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"}
        assert find("tpu-vm", env=env) == Place("10.0.0.5:8476", 2, 1)
        del attributes["agent-worker-number"]
        with pytest.raises(ConfigError, match="has no agent-worker-number"):
            find("tpu-vm", env=env)
        server.shutdown()
        thread.join()
