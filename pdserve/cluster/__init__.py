"""What the actors run, loaded inside their processes: name → "module:function"."""

ENTRIES = {
    "node": "pdserve.cluster.node_front:start_front",
    "router": "pdserve.cluster.router_front:start_front",
    "rank": "pdserve.cluster.rank_entry:run_incarnation",
}
