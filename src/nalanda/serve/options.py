"""The options of `nalanda serve`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServeOptions:
    """The server, and the address where it listens."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 is reached from other machines."""
    port: int = 8000
    """Port to listen at."""
    engine: str = "auto"
    """vllm, transformers, or auto: vLLM where it is installed."""
