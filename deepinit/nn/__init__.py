"""Linen modules that take `initializer: (role, layer) -> closure` and a residual rule, and know no scheme by name."""

from deepinit.nn.attention import Attention
from deepinit.nn.block import Block
from deepinit.nn.decoder import Decoder
from deepinit.nn.mlp import Mlp
from deepinit.nn.moe import Moe
from deepinit.nn.norm import Norm
from deepinit.nn.residual import ResidualAdd
from deepinit.nn.rope import rotary
from deepinit.nn.stack import Stack

__all__ = ["Attention", "Block", "Decoder", "Mlp", "Moe", "Norm", "ResidualAdd", "Stack", "rotary"]
