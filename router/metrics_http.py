"""What Prometheus reads of the router: its metrics, and where those of the nodes are.

``/metrics/targets`` is in the form of Prometheus' HTTP service discovery (``http_sd_configs``), so
that nodes which come and go are scraped without a list of theirs anywhere.
"""

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from pdserve.telemetry.exposition import CONTENT_TYPE
from router.metrics import Now
from router.service import Service, version


def add_metrics_routes(app: FastAPI, service: Service) -> None:
    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics.expose(_now(service)), media_type=CONTENT_TYPE)

    @app.get("/metrics/targets")
    async def targets() -> list[dict[str, object]]:
        return [
            {
                "targets": [view.address.metrics_address],
                "labels": {
                    "__meta_pdserve_node": view.name,
                    "__meta_pdserve_role": view.role.value,
                },
            }
            for view in service.channels.views()
            if view.address.metrics_address is not None
        ]


def _now(service: Service) -> Now:
    return Now(
        views=service.channels.views(),
        num_requests=service.dispatcher.num_running,
        queues=service.dispatcher.queues(),
        ready=service.readiness().ready,
        headroom_blocks=service.dispatcher.blocks_left(),
        model=service.spec.served_name,
        version=version(),
    )
