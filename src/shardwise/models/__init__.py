"""One readable family of decoders, as plain torch modules on one device.

Nothing here knows about parallelism: the engine replaces attributes (``attend``, ``exchange``, ``loss_function``) and
takes modules apart.
"""

from __future__ import annotations

from shardwise.models.decoder import Decoder, initial_value, initialise
from shardwise.models.dot_product import AttentionArguments
from shardwise.models.loss import cross_entropy_sum

__all__ = ["AttentionArguments", "Decoder", "cross_entropy_sum", "initial_value", "initialise"]
