"""The rank process: an engine and a KV endpoint at the front's service.

python -m pdserve.rank.process SPEC.json
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from kv_transfer.endpoint import KvEndpoint
from kv_transfer.transports.grpc_wire import GrpcWire
from pdserve.core.environment import set_up_gpu_rank
from pdserve.engine.parallel import start_tp_group
from pdserve.engine.runner import ModelRunner
from pdserve.rank.parts import RankParts
from pdserve.rank.run_dir import RunDir
from pdserve.rank.service import serve_rank
from pdserve.rank.spec import RankSpec

SWITCH_INTERVAL_S = 50e-6  # at Python's 5 ms, KV threads wait that long for the launching thread


def run_rank(spec: RankSpec) -> None:
    """The outermost function of a rank process. Returns when the front stops it or is gone.

    Every error is logged, told to the front and raised.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if torch.device(spec.engine.device).type == "cuda":
        set_up_gpu_rank()
    torch.set_num_threads(spec.engine.num_threads)
    serve_rank(
        RunDir(spec.run_dir),
        spec.engine.tp_rank,
        partial(open_parts, spec),
        start_timeout_s=spec.start_timeout_s,
        report_timeout_s=spec.report_timeout_s,
    )


@contextmanager
def open_parts(spec: RankSpec) -> Iterator[RankParts]:
    """The model on its device and a KV endpoint on its cache."""
    config = spec.engine
    with ExitStack() as stack:
        group = start_tp_group(
            store_path=RunDir(spec.run_dir).tp_store,
            tp_rank=config.tp_rank,
            tp_size=config.tp_size,
            device=torch.device(config.device),
            timeout_s=spec.start_timeout_s,
        )
        stack.callback(group.close)
        runner = ModelRunner(config, group)
        endpoint = KvEndpoint(
            kv=runner.kv.tensor,
            layout=runner.layout,
            rank=config.tp_rank,
            peer_id=spec.peer_id,
            config=spec.kv_transfer,
            open_wire=partial(
                GrpcWire, host=spec.host, port_range=spec.port_range, access=spec.access
            ),
            directory=spec.run_dir,
        )
        stack.callback(endpoint.close)
        yield RankParts(runner, endpoint)


def main(arguments: Sequence[str]) -> None:
    """Run the rank that the JSON file names."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    run_rank(RankSpec.from_json(Path(arguments[0]).read_text(encoding="utf-8")))


if __name__ == "__main__":
    main(sys.argv[1:])
