"""Layers of a vision transformer."""

import torch.nn.functional as F
from torch import nn


class PatchEmbed(nn.Module):
    """Embeds the patches of a square picture as vectors."""

    def __init__(self, img_size, patch_size, in_chans, embed_dim, bias=True):
        super().__init__()
        self.patch_size, self.num_patches = (patch_size, patch_size), (img_size // patch_size) ** 2
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, patch_size, bias=bias)

    def forward(self, pictures):
        """Return vectors of shape (batch, pieces, features)."""
        return self.proj(pictures).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Self-attention."""

    def __init__(self, dim, num_heads, qkv_bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=qkv_bias), nn.Linear(dim, dim)

    def forward(self, hidden):
        """Return vectors of the same shape."""
        shape = (*hidden.shape[:2], 3, self.num_heads, -1)
        query, key, value = self.qkv(hidden).view(shape).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self, in_features, hidden_features, act_layer=nn.GELU, drop=0.0):
        super().__init__()
        self.fc1, self.act, self.fc2 = (
            nn.Linear(in_features, hidden_features),
            act_layer(),
            nn.Linear(hidden_features, in_features),
        )

    def forward(self, hidden):
        """Return vectors of the same shape."""
        return self.fc2(self.act(self.fc1(hidden)))


class Block(nn.Module):
    """Attention and an MLP, each after a norm, with a residual connection."""

    def __init__(self, dim, num_heads, mlp_ratio=4.0, qkv_bias=False, qk_scale=None, norm_layer=nn.LayerNorm):
        super().__init__()
        self.norm1, self.attn = norm_layer(dim), Attention(dim, num_heads, qkv_bias)
        self.norm2, self.mlp = norm_layer(dim), Mlp(dim, int(dim * mlp_ratio))

    def forward(self, hidden):
        """Return vectors of the same shape."""
        hidden = hidden + self.attn(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))
