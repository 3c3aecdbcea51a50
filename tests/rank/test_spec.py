"""A rank's spec survives the way to its process."""

from pathlib import Path

import pytest

from pdserve.core.config import KvTransferConfig
from pdserve.core.errors import ConfigError
from pdserve.rank.spec import RankSpec
from tests.rank.tiny_llama import tiny_engine_config


def test_a_spec_comes_out_of_its_json_as_it_went_in():
    spec = RankSpec(
        node="decode-0",
        peer_id="decode-0#2",
        run_dir=Path("/somewhere"),
        engine=tiny_engine_config(Path("/models/tiny"), tp_size=2, tp_rank=1),
        kv_transfer=KvTransferConfig(transport="gloo", timeout_s=1.5),
        host="10.1.2.3",
        port_range=(2000, 2010),
        start_timeout_s=7,
    )
    assert RankSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"node": "x"}', "null"])
def test_what_is_no_spec_is_refused_by_name(text):
    with pytest.raises(ConfigError, match="rank spec"):
        RankSpec.from_json(text)
