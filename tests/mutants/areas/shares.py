"""Groups of query heads that several blocks share in the backward pass: the model, its limits, and the launch."""

from __future__ import annotations

from ..mutant import Mutant, mutants

SHARES = "kernels/tilelang/backward/shares"
MODEL = ("kernels/tilelang/backward/shares/test_shares.py",)
CHOICE = ("kernels/tilelang/backward/shares/test_shares_choice.py",)
LAST = ("kernels/tilelang/backward/shares/test_last_wave.py",)
ORDER = ("kernels/tilelang/backward/shares/test_order.py",)
EMULATED = "kernels/tilelang/backward/shares/test_shares_emulated.py"
BLOCKS = (f"{EMULATED}::test_each_head_has_one_block",)
SUMS = (f"{EMULATED}::test_parts_are_added_up_in_float32",)

STREAMS = ("kernels/tilelang/backward/test_two_streams.py",)

MUTANTS: list[Mutant] = [
    *mutants(
        "kernels/tilelang/backward/two_streams.py",
        STREAMS,
        {
            "streams: the second does not wait for what came before": ("    second.wait_stream(current)\n", ""),
            "streams: nothing waits for the second": (
                "        current.wait_stream(second)\n",
                "        second.wait_stream(current)\n",
            ),
            "streams: a failed launch leaves the second one running": ("    finally:  #", "    except SystemExit:  #"),
            "streams: one second for all threads": (", threading.get_ident()", ""),
            "streams: one second for all streams": (
                "current.device_index, current.cuda_stream, ",
                "current.device_index, ",
            ),
            "streams: beside itself": ("if found == current:", "if found is None:"),
            "streams: all keys under a causal mask": ("if not causal:", "if causal is not None:"),
            "streams: however small the pass is": (">= LEAST_WORK", ">= 0"),
            "streams: packed calls too": ("if forward.packed or not known", "if not known"),
            "streams: whatever the mask": ("if forward.packed or not known or", "if forward.packed or"),
        },
    ),
    *mutants(
        "kernels/tilelang/backward/launch.py",
        STREAMS,
        {
            "streams: never": ("if beside is not None and queries is not None:", "if False:"),
            "streams: shares are added up on the first": (
                "*of_main, *steps, *numbers)\n            if shares > 1:",
                "*of_main, *steps, *numbers)\n            if shares < 0:",
            ),
        },
    ),
    *mutants(
        "kernels/tilelang/backward/hopper/preferences.py",
        ("kernels/tilelang/backward/hopper/test_unpadded.py", "kernels/tilelang/backward/hopper/test_exchange.py"),
        {
            "hopper: padding is never left out": ("unpadded=bool(_used_columns(call))", "unpadded=False"),
            "hopper: 80 queries at head dim 112, causal": (" != {128: 112}:", " is not None:"),
            "hopper: head dim 80 exchanges dS as 96 does": (" and _used_columns(call) != {})", " and False)"),
            "hopper: head dim 96 exchanges dS as 80 does": (" and _used_columns(call) != {})", ")"),
            "hopper: shares exchange dS in the plainest way": (
                "gains = config.words and not config.stores_first",
                "gains = False",
            ),
        },
    ),
    *mutants(
        f"{SHARES}/waves.py",
        MODEL,
        {
            "shares: keys before the first query's are seen by fewer": (
                "min(max(key - (seqlen_k - seqlen_q), 0) // block_M, end)",
                "min(max(key, 0) // block_M, end)",
            ),
            "shares: the last share has a head more": ("(share < group % shares)", "(share >= group % shares)"),
            "shares: adding them up costs nothing": (
                "time + costs.launch + key_tiles * (shares * costs.add + costs.store)",
                "time",
            ),
            "shares: one part is written whatever their number": ("shares * costs.add", "costs.add"),
            "shares: any gain is worth it": ("1, worthwhile * whole", "1, 1e9 * whole"),
            "shares: more than the workspace allows": (
                "range(2, min(groups.group, most) + 1)",
                "range(2, groups.group)",
            ),
            "shares: heads one after another": (
                "for first in range(0, len(pairs), side):",
                "for first in range(0, len(pairs), side := 1):",
            ),
            "shares: a share starts as a whole group": (
                "costs.start if shares == 1 else costs.split_start",
                "costs.start",
            ),
            "shares: a tile's time on all slots together": ("flops * slots / (", "flops / ("),
            "shares: whole groups in tiles of shares": ("if whole is None else whole", "if whole else 0.0"),
            "shares: long walks cost no more": ("* (1 + self.crowding * max(heads - self.walk, 0))", ""),
            "shares: blocks drift apart without a mask": ("crowding if masked and not narrow else 0.0", "crowding"),
            "shares: a block waits for the slot that is free last": ("free[0] + time", "max(free) + time"),
        },
    ),
    *mutants(
        f"{SHARES}/choice.py",
        CHOICE,
        {
            "shares: the workspace without dv's parts": (
                "// (of_keys * (forward.head_dim + forward.head_dim_v))",
                "// (of_keys * forward.head_dim)",
            ),
            "shares: packed calls as dense ones": ("if forward.packed or forward.dropout or not", "if not"),
            "shares: whatever the variant": ("return is_known(call) or config.mask_words", "return True"),
            "shares: only where all tiles are known": (
                "return is_known(call) or config.mask_words",
                "return is_known(call)",
            ),
            "shares: any gain is worth it under a window": ("else UNSURE", "else WORTHWHILE"),
            "shares: a window as long as the sequence": ("else min(q_shape[1], SEEN)", "else q_shape[1]"),
            "shares: 80 queries under a mask": (
                "config.block_M == CROWDED and masked",
                "config.block_M == CROWDED > 80",
            ),
            "shares: 64 queries without a mask": ("config.block_M == CROWDED and masked", "config.block_M == CROWDED"),
            "shares: tiles of 80 queries at any length": (
                "return short if narrow < WIDE_TIME * wide else None",
                "return None",
            ),
            "shares: tiles of 64 queries wherever they visit less": ("narrow < WIDE_TIME * wide", "narrow < wide"),
            "shares: tiles of 64 queries up to 4096": ("narrow < WIDE_TIME * wide", "narrow"),
            "shares: no split kernel is warmed": ("dict.fromkeys((*whole, *splits))", "dict.fromkeys(whole)"),
            "shares: wide heads cost what others do": ("if isinstance(config, HopperWideConfig):", "if False:"),
            "shares: wide heads keep whole groups": (
                "HOPPER = (HopperBackwardConfig, HopperWideConfig)",
                "HOPPER = (HopperBackwardConfig,)",
            ),
            "shares: workspace of one share less": (
                "else 4 * shares * k_shape[0]",
                "else 4 * (shares - 1) * k_shape[0]",
            ),
        },
    ),
    *mutants(
        f"{SHARES}/order.py",
        ORDER,
        {
            "order: the cache alone": ("return best if times", "return for_cache if times"),
            "order: heads side by side cost nothing": ("OF_HEAD * max(side - FREE, 0) + OF_CACHE", "0.0 + OF_CACHE"),
            "order: caches cost nothing": (" + OF_CACHE * max(side * caches - 1, 0)", ""),
            "order: kernels without dq pay for them too": ("(1 + crowding * adds_dq(call))", "(1 + crowding)"),
            "order: any gain is worth it": ("<= WORTHWHILE * times", "<= times"),
            "order: packed calls too": (" or call.forward.packed or not", " or not"),
            "order: however many blocks": ("if len(groups.tiles) * heads > MANY_WAVES * slots:", "if False:"),
        },
    ),
    *mutants(
        f"{SHARES}/choice.py",
        LAST,
        {
            "last wave: however many blocks": (
                "return whole_blocks(config, k_shape) <= MANY_WAVES * slots",
                "return True",
            )
        },
    ),
    *mutants(
        f"{SHARES}/last_wave.py",
        LAST,
        {
            "last wave: never": ("found, least = Dealt(shares, whole_keys), time", "least = time"),
            "last wave: queries that do not see the first keys": (
                "hidden = q_shape[1] - 1 if call.forward.variant == CAUSAL else 0",
                "hidden = 0",
            ),
            "last wave: no key is left to share": ("max(hidden, 1)", "hidden"),
            "last wave: a key less than all queries see": (
                "hidden = q_shape[1] - 1 if",
                "hidden = q_shape[1] if",
            ),
            "last wave: as if all keys had parts": ("most_shares(call, q_shape, later)", "q_shape[2]"),
            "last wave: masks whose tiles are guessed": ("if not is_known(call):", "if False:"),
            "last wave: the first keys under a mask": ("if call.forward.variant != CAUSAL:", "if True:"),
            "last wave: other tiles for the first keys": (
                "return unmasked, dataclasses.replace(split(call, config, shares), split=False)",
                "return unmasked, default(unmasked)",
            ),
        },
    ),
    *mutants(
        "kernels/tilelang/backward/jobs.py",
        (*LAST, *CHOICE),
        {
            "last wave: the tuner does not compile the first keys' kernel": (
                "return (*own, _of_first_keys(call, config, shares)) if whole_keys else own",
                "return own",
            ),
            "last wave: no kernel of the first keys is warmed": (
                "return (*own, _of_first_keys(call, default(call), 2))",
                "return own",
            ),
        },
    ),
    *mutants(
        "kernels/tilelang/backward/launch.py",
        CHOICE,
        {
            "shares: of calls as they come, never split": (
                "config, of_groups = configured(call, q_shape, k_shape)",
                "config, of_groups = configured(call, q_shape, k_shape)[0], Dealt()",
            ),
            "shares: the parts are not added up": ("add_shares(call)(*by_share", "print(*by_share"),
            "shares: parts of 16 bits": ("x.shape[3]), dtype=torch.float32) for x", "x.shape[3])) for x"),
            "shares: the tuner measures whole groups": ("k_shape, scale, *of_groups(config)),", "k_shape, scale),"),
            "shares: the tuner compiles whole groups": ("jobs_of(call, launched(config), of_groups(config)),", "(),"),
            "last wave: dq's kernel as for the later keys": (
                "of_queries = _of_queries(call, q_shape, k_shape, scale)",
                "of_queries = _of_queries(call, q_shape, later_shape, scale)",
            ),
            "last wave: the first keys are not launched": ("if whole_keys else None", "if whole_keys < 0 else None"),
            "last wave: all keys are shared as well": (
                "rows = (q, k[:, whole_keys:], v[:, whole_keys:], *others)",
                "pass",
            ),
            "last wave: sums are added up from the first key on": (
                "for x in gradients), whole_keys)",
                "for x in gradients), 0)",
            ),
        },
    ),
    *mutants(
        "kernels/tilelang/backward/library.py",
        CHOICE,
        {
            "shares: nobody compiles the kernel for their sums": (
                "config.split\n    adding",
                "config.split is None\n    adding",
            )
        },
    ),
    *mutants(
        "kernels/tilelang/backward/places.py",
        BLOCKS,
        {
            "shares: each begins with the group's first head": ("+ share * least + T.min(share, larger)", ""),
            "shares: none has a head more": ("least + T.if_then_else(share < larger, 1, 0)", "least"),
        },
    ),
    *mutants(
        f"{SHARES}/add.py",
        SUMS,
        {"shares: the last part alone": ("total[c] += part[c]", "total[c] = part[c]")},
    ),
]
