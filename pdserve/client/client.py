"""The synchronous client of the public gRPC API."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Self, Unpack, overload

import grpc

from pdserve.client import messages
from pdserve.client.connection import credentials, metadata
from pdserve.client.messages import Message, Prompt, RequestOptions
from pdserve.client.results import Chunk, Completion, ModelInfo, NodeLoad, ServerInfo
from pdserve.rpc.public import CLIENT_OPTIONS
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc


class Client:
    """Talks to a router's gRPC port; threads may share it.

        with Client("127.0.0.1:8001") as client:
            print(client.generate("The capital of France is", max_tokens=8, temperature=0).text)
            for chunk in client.generate([{"role": "user", "content": "Hi!"}], stream=True):
                print(chunk.text, end="", flush=True)

    Every method raises the errors of ``pdserve.core.errors``.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: bool = False,
        ca_file: str | Path | None = None,
    ) -> None:
        """``api_key``: default ``$PDSERVE_API_KEY``; the router shares its queue fairly among keys.

        ``ca_file``: PEM with the CAs to trust, which means TLS; ``tls`` alone trusts public ones.
        """
        secured = credentials(tls=tls, ca_file=ca_file)
        self._channel = (
            grpc.insecure_channel(address, options=CLIENT_OPTIONS)
            if secured is None
            else grpc.secure_channel(address, secured, options=CLIENT_OPTIONS)
        )
        self._metadata = metadata(api_key)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; requests that still run are aborted."""
        self._channel.close()

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        stream: Literal[False] = False,
        model: str | None = None,
        timeline: bool = False,
        label: str | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        stream: Literal[True],
        model: str | None = None,
        timeline: bool = False,
        label: str | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Chunk]: ...

    def generate(
        self,
        prompt: Prompt,
        *,
        stream: bool = False,
        model: str | None = None,
        timeline: bool = False,
        label: str | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion | Iterator[Chunk]:
        """Answer a text, token ids or chat messages; ``options`` are ``RequestOptions``.

        With ``stream`` the chunks as they come; leaving the iteration aborts the request.
        ``timeline`` asks for the stages of the request, ``label`` names it in the router's log;
        a lower ``priority`` is earlier where requests have to wait.
        """
        request = messages.generate_request(
            prompt, options, model=model, timeline=timeline, label=label, priority=priority
        )
        chunks = self._chunks(request, timeout_s)
        return chunks if stream else messages.completion_of(chunks)

    def abort(self, request_id: str) -> bool:
        """End a request that is being streamed elsewhere; False where it is not running."""
        with messages.raising():
            return self._stub.Abort(
                pb.AbortRequest(request_id=request_id), metadata=self._metadata
            ).found

    def model_info(self) -> ModelInfo:
        """What is served."""
        with messages.raising():
            return messages.model_info_of(
                self._stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=self._metadata)
            )

    def server_info(self) -> ServerInfo:
        """Whether the router is ready, and which routes it took."""
        with messages.raising():
            return messages.server_info_of(
                self._stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=self._metadata)
            )

    def loads(self) -> tuple[NodeLoad, ...]:
        """The load of every node."""
        with messages.raising():
            return messages.loads_of(
                self._stub.GetLoads(pb.GetLoadsRequest(), metadata=self._metadata)
            )

    def watch_loads(self, interval_s: float | None = None) -> Iterator[tuple[NodeLoad, ...]]:
        """The loads now and then every ``interval_s`` (default 1), until the iteration is left."""
        call = self._stub.WatchLoads(
            pb.WatchLoadsRequest(interval_s=interval_s), metadata=self._metadata
        )
        try:
            with messages.raising():
                for message in call:
                    yield messages.loads_of(message)
        finally:
            call.cancel()

    def tokenize(
        self, text: str | Sequence[Message], *, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Token ids of a text, or of chat messages by the model's template."""
        request = messages.tokenize_request(text, add_special_tokens)
        with messages.raising():
            return tuple(self._stub.Tokenize(request, metadata=self._metadata).token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        request = messages.detokenize_request(token_ids)
        with messages.raising():
            return self._stub.Detokenize(request, metadata=self._metadata).text

    def _chunks(self, request: pb.GenerateRequest, timeout_s: float | None) -> Iterator[Chunk]:
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            with messages.raising():
                for message in call:
                    yield messages.chunk_of(message)
        finally:
            call.cancel()
