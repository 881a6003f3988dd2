"""One run seed, many independent streams, none of which depends on timing or on worker counts."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str, bits: int = 63) -> int:
    """A seed of `bits` bits that is a function of `parts` alone (SHA-256 of their representation).

    `derive_seed(run_seed, "reply", step, task_index, member, turn)` names one sampled reply.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return value >> (64 - bits)
