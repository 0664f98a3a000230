"""Batches and states of the data, compared and sent; the thread that reads."""

import json
import threading

import torch


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nalanda-data"]


def same(batch: dict, other: dict) -> bool:
    return batch.keys() == other.keys() and all(
        torch.equal(batch[key], other[key]) for key in batch
    )


def through_json(state: dict) -> dict:
    return json.loads(json.dumps(state))
