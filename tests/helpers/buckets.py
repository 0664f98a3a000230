"""An S3 server on this machine, which a test may stop and start again."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

SECRET = "geheim7x7Q9zK"
BUCKET = "bucket"


def environment(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


class Buckets:
    """moto's server, with one bucket. Its content outlives a stop."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.make = lambda: ThreadedMotoServer(
            ip_address="127.0.0.1", port=self.port, verbose=False
        )
        self.server = self.make()
        self.server.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.server.stop()

    def start(self) -> None:
        self.server = self.make()
        self.server.start()

    def client(self):
        """A client with this server's settings, whatever the environment holds."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="key",
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def put(self, name: str, content: bytes) -> None:
        self.client().put_object(Bucket=BUCKET, Key=name, Body=content)

    def get(self, name: str) -> bytes:
        return self.client().get_object(Bucket=BUCKET, Key=name)["Body"].read()

    def clear(self) -> None:
        for name in self.names():
            self.client().delete_object(Bucket=BUCKET, Key=name)

    def names(self, folder: str = "") -> list[str]:
        found = self.client().list_objects_v2(Bucket=BUCKET, Prefix=folder)
        return [entry["Key"] for entry in found.get("Contents", [])]


@contextmanager
def buckets() -> Iterator[Buckets]:
    server = Buckets()
    server.client().create_bucket(Bucket=BUCKET)
    try:
        yield server
    finally:
        server.stop()
