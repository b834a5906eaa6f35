"""The Hopper schedule's default configurations; written by benchmarks/tune_defaults.py, not by hand."""

from .config import HopperConfig

ORIGIN = "NVIDIA H200, 2026-11-20 (short), 2026-11-21 and -23 (long rows, by hand), torch 2.11.0+cu130, tilelang 0.1.15"

# (head_dim, head_dim_v, kind of mask, lengths); see defaults.py
TABLE = {
    (64, 64, "full", "short"): HopperConfig(128, 128, num_stages=3, q_in_registers=True, ping_pong=True),
    (64, 64, "full", "long"): HopperConfig(192, 128, num_stages=3, ping_pong=True),
    (64, 64, "masked", "short"): HopperConfig(128, 128, num_stages=3, q_in_registers=True, ping_pong=True),
    (64, 64, "masked", "long"): HopperConfig(192, 128, ping_pong=True),
    (64, 64, "scored", "short"): HopperConfig(128, 128, num_stages=3, ping_pong=True),
    (64, 64, "scored", "long"): HopperConfig(192, 128, ping_pong=True),
    (96, 96, "full", "short"): HopperConfig(128, 128, q_in_registers=True, ping_pong=True),
    (96, 96, "full", "long"): HopperConfig(192, 112, ping_pong=True),
    (96, 96, "masked", "short"): HopperConfig(128, 128, q_in_registers=True, ping_pong=True),
    (96, 96, "masked", "long"): HopperConfig(128, 128, q_in_registers=True, ping_pong=True),
    (96, 96, "scored", "short"): HopperConfig(128, 112, ping_pong=True),
    (96, 96, "scored", "long"): HopperConfig(128, 128, q_in_registers=True, ping_pong=True),
    (128, 128, "full", "short"): HopperConfig(128, 128, q_in_registers=True, ping_pong=True),
    (128, 128, "full", "long"): HopperConfig(128, 160, ping_pong=True, producer_registers=48, cluster=2),
    (128, 128, "masked", "short"): HopperConfig(128, 128, q_in_registers=True, ping_pong=True),
    (128, 128, "masked", "long"): HopperConfig(128, 128, q_in_registers=True, ping_pong=True),
    (128, 128, "scored", "short"): HopperConfig(128, 112, ping_pong=True),
    (128, 128, "scored", "long"): HopperConfig(128, 128, q_in_registers=True, ping_pong=True),
    (192, 128, "full", "short"): HopperConfig(128, 128, ping_pong=True),
    (192, 128, "full", "long"): HopperConfig(128, 128, ping_pong=True),
    (192, 128, "masked", "short"): HopperConfig(128, 96, q_in_registers=True, ping_pong=True),
    (192, 128, "masked", "long"): HopperConfig(128, 128, ping_pong=True),
    (192, 192, "full", "short"): HopperConfig(128, 112, ping_pong=True),
    (192, 192, "full", "long"): HopperConfig(128, 112, ping_pong=True, producer_registers=48, cluster=2),
    (192, 192, "masked", "short"): HopperConfig(128, 112, ping_pong=True),
    (192, 192, "masked", "long"): HopperConfig(128, 112, ping_pong=True),
    (256, 256, "full", "short"): HopperConfig(128, 80, ping_pong=True),
    (256, 256, "full", "long"): HopperConfig(128, 80, ping_pong=True, producer_registers=48, cluster=2),
    (256, 256, "masked", "short"): HopperConfig(128, 64, ping_pong=True),
    (256, 256, "masked", "long"): HopperConfig(128, 80, ping_pong=True),
}
