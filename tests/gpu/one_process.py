"""NCCL's link where both ranks of a pair, and several pairs of one GPU, are in one process.

Ranks are processes of their own, each with one thread that lets go of its links. Here several
threads would do so at once, for communicators of one GPU whose other ranks are in the same process:
one was aborted then once, for a reason that is not known. So they do it one after the other.
"""

from threading import Lock

import torch
from torch._C._distributed_c10d import Store

from kv_transfer.transports.pair import Moving
from kv_transfer.transports.pair_link import PairLink
from kv_transfer.transports.process_group import NcclGroup
from kv_transfer.transports.transport import LinkSetting, Stream

NCCL_IN_ONE_PROCESS = "tests.gpu.one_process:one_process_link"

_letting_go = Lock()


class OneProcessGroup:
    """NCCL's group, aborted by one thread at a time."""

    def __init__(self, store: Store, rank: int, setting: LinkSetting) -> None:
        self._group = NcclGroup(store, rank, setting)

    def connect(self, other: int, *, sends: bool) -> None:
        self._group.connect(other, sends=sends)

    def send(self, data: torch.Tensor, other: int) -> Moving:
        return self._group.send(data, other)

    def receive(self, data: torch.Tensor, other: int) -> Moving:
        return self._group.receive(data, other)

    def abort(self) -> None:
        with _letting_go:
            self._group.abort()


def one_process_link(stream: Stream, setting: LinkSetting) -> PairLink:
    return PairLink(stream, setting, OneProcessGroup, setting.kv.device)
