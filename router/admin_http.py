"""Orders to a running cluster over HTTP: drain, scale, role. For who has the cluster's token."""

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, StrictBool, StrictInt, StrictStr

from pdserve.core.orders import ChangeRole, Drain, Scale
from router.answer_format import Json
from router.http_access import NEEDS_TOKEN, has_token
from router.http_bodies import read_body
from router.service import Service

MAX_BYTES = 4096
UNAUTHORIZED = 401


class DrainBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    node: StrictStr
    undo: StrictBool = False


class ScaleBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: StrictStr
    count: StrictInt


class RoleBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    node: StrictStr
    role: StrictStr


def add_admin_routes(app: FastAPI, service: Service) -> None:
    @app.post("/admin/drain")
    async def drain(request: Request) -> Json:
        _check_token(request, service.spec.admin_token)
        body = await read_body(request, DrainBody, MAX_BYTES, bound="an order")
        return {"message": await service.orders.place(Drain(node=body.node, undo=body.undo))}

    @app.post("/admin/scale")
    async def scale(request: Request) -> Json:
        _check_token(request, service.spec.admin_token)
        body = await read_body(request, ScaleBody, MAX_BYTES, bound="an order")
        return {"message": await service.orders.place(Scale(role=body.role, count=body.count))}

    @app.post("/admin/role")
    async def role(request: Request) -> Json:
        _check_token(request, service.spec.admin_token)
        body = await read_body(request, RoleBody, MAX_BYTES, bound="an order")
        order = ChangeRole(node=body.node, role=body.role)
        return {"message": await service.orders.place(order)}


def _check_token(request: Request, token: str | None) -> None:
    if not has_token(request.headers.get("authorization"), token):
        raise HTTPException(UNAUTHORIZED, NEEDS_TOKEN)
