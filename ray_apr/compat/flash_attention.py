"""What is used of flash-attn-4 that it does not promise to keep (see `lookup`): the two functions
that PyTorch's own registration of it calls, too."""

from __future__ import annotations

from ray_apr.compat.lookup import PrivateNames

PACKAGE = "flash-attn-4"
_MODULE = "flash_attn.cute.interface"
_OF_ROW = (
    "softmax_scale,causal,window_size_left,cu_seqlens_q,cu_seqlens_k,max_seqlen_q,max_seqlen_k"
)

FLASH_ATTENTION = PrivateNames(
    distributions=(PACKAGE,),
    tested="4.0.0b36",
    names={"_flash_attn_fwd": _MODULE, "_flash_attn_bwd": _MODULE},
    members={
        "_flash_attn_fwd": f"(q,k,v,return_lse,{_OF_ROW})",
        "_flash_attn_bwd": f"(q,k,v,out,dout,lse,deterministic,{_OF_ROW})",
    },
)
