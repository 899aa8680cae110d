"""Suggestions for unknown keys of the run file.

unknown key -> another trainer's name? -> a key of another section? -> the nearest spelling

FOREIGN maps the names used by nanoGPT, nanochat, litgpt, axolotl, TRL, LLaMA-Factory and the Hugging Face Trainer to
ours, and says what to do if there is no corresponding key.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from itertools import pairwise

__all__ = ["FOREIGN", "meant_keys", "nearest", "suggest_key", "tidy_name"]

_ALL_OF_THEM = "Keys here: "  # prefix of the list of valid keys, shown if no valid key resembles the unknown key
_STEP_SIZE = "phases.N.batch_tokens (tokens in one step: rows x accumulation x context) and phases.N.micro_batch (rows)"

_HELD_OUT = (
    "(the held-out fraction of the phase; for the text of the run: data.val_fraction;"
    " to try a run on a small part of its data, add --smoke to any command)"
)
_TRIAL = (
    "(use a small number; or leave the file as it is and add --smoke to any command, which shrinks the run to minutes)"
)

_ZERO = "phases.N.offload (`optimizer` keeps the optimizer state in host memory; homing has no other DeepSpeed setting)"

# Other trainers' names, in lower case with underscores -> our key, or a sentence.
FOREIGN: dict[str, str] = {
    # shape
    "d_model": "model.width",
    "n_embd": "model.width",
    "hidden_size": "model.width",
    "hidden_dim": "model.width",
    "embed_dim": "model.width",
    "embedding_size": "model.width",
    "dim": "model.width",
    "n_layer": "model.layers",
    "n_layers": "model.layers",
    "num_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "n_head": "model.heads",
    "n_heads": "model.heads",
    "num_heads": "model.heads",
    "num_attention_heads": "model.heads",
    "n_kv_head": "model.kv_heads",
    "n_kv_heads": "model.kv_heads",
    "n_query_groups": "model.kv_heads",
    "num_kv_heads": "model.kv_heads",
    "num_key_value_heads": "model.kv_heads",
    "head_dim": "model.head_size",
    "d_ff": "model.ffn_width",
    "ffn_hidden_size": "model.ffn_width",
    "intermediate_size": "model.ffn_width",
    "mlp_dim": "model.ffn_width",
    "block_size": "model.context",
    "context_length": "model.context",
    "context_size": "model.context",
    "seq_len": "model.context",
    "seq_length": "model.context",
    "sequence_len": "model.context",
    "sequence_length": "model.context",
    "max_length": "model.context",
    "max_seq_len": "model.context",
    "max_seq_length": "model.context",
    "max_sequence_length": "model.context",
    "max_position_embeddings": "model.context",
    "cutoff_len": "model.context",
    "tie_word_embeddings": "model.tied",
    "tie_embeddings": "model.tied",
    "weight_tying": "model.tied",
    "rope_theta": "model.rope_base",
    "rms_norm_eps": "model.norm_eps",
    "layer_norm_eps": "model.norm_eps",
    "model_type": "model.arch",
    "architecture": "model.arch",
    # vocabulary and text
    "n_vocab": "tokenizer.vocab_size",
    "vocabulary_size": "tokenizer.vocab_size",
    "padded_vocab_size": "tokenizer.vocab_size (padding rows exist only inside the trainer)",
    "tokenizer_path": "tokenizer.file",
    "tokenizer_name": "tokenizer.file",
    "use_existing_tokenizer": "tokenizer.file (the tokenizer.json to reuse)",
    "tokenizer_dir": "tokenizer.file (of an existing one; a new one is stored next to the shards)",
    "special_tokens": "tokenizer.specials (standard or one)",
    "train_path": "data.text",
    "train_file": "data.text",
    "train_files": "data.text",
    "train_data": "data.text",
    "dataset": "data.text",
    "datasets": "data.text",
    "dataset_path": "data.text",
    "val_path": "data.validation",
    "validation_file": "data.validation",
    "val_data": "data.validation",
    "eval_dataset": "data.validation",
    "val_set_size": "data.val_fraction",
    "val_ratio": "data.val_fraction",
    "val_split": "data.val_fraction",
    "dataset_text_field": "data.text_field",
    "text_column": "data.text_field",
    "data_dir": "data.dir",
    "shard_lines": "data.shard_tokens (in tokens, not lines)",
    "lines_per_shard": "data.shard_tokens (in tokens, not lines)",
    "train_shard_lines": "data.shard_tokens (in tokens, not lines)",
    # batch and length
    "batch_size": _STEP_SIZE,
    "global_batch_size": _STEP_SIZE,
    "train_batch_size": _STEP_SIZE,
    "total_batch_size": "phases.N.batch_tokens",
    "device_batch_size": "phases.N.micro_batch",
    "micro_batch_size": "phases.N.micro_batch",
    "per_device_train_batch_size": "phases.N.micro_batch",
    "per_device_eval_batch_size": "phases.N.micro_batch (evaluation uses the same rows)",
    "gradient_accumulation_steps": "phases.N.batch_tokens (the trainer accumulates up to this many tokens)",
    "grad_accum_steps": "phases.N.batch_tokens (the trainer accumulates up to this many tokens)",
    "accumulate_grad_batches": "phases.N.batch_tokens (the trainer accumulates up to this many tokens)",
    "max_iters": "phases.N.steps",
    "max_steps": "phases.N.steps",
    "num_steps": "phases.N.steps",
    "total_steps": "phases.N.steps",
    "train_steps": "phases.N.steps",
    "num_iterations": "phases.N.steps",
    "n_steps": "phases.N.steps",
    "num_epochs": "phases.N.epochs",
    "num_train_epochs": "phases.N.epochs",
    "n_epochs": "phases.N.epochs",
    "max_epochs": "phases.N.epochs",
    "max_tokens": "phases.N.tokens",
    "num_tokens": "phases.N.tokens",
    "total_tokens": "phases.N.tokens",
    "train_tokens": "phases.N.tokens",
    # rates
    "learning_rate": "phases.N.lr",
    "max_lr": "phases.N.lr",
    "matrix_lr": "phases.N.lr",
    "embedding_lr": "phases.N.lr_embedding",
    "unembedding_lr": "phases.N.lr_head",
    "min_lr": "phases.N.floor (a fraction of the peak, such as 0.1)",
    "min_lr_ratio": "phases.N.floor",
    "final_lr_frac": "phases.N.floor",
    "optim": "phases.N.optimizer (muon or adamw)",
    "lr_scheduler": "phases.N.schedule",
    "lr_scheduler_type": "phases.N.schedule",
    "scheduler": "phases.N.schedule",
    "decay_lr": "phases.N.schedule",
    "warmup": "phases.N.warmup_steps",
    "warmup_iters": "phases.N.warmup_steps",
    "warmup_ratio": "phases.N.warmup_steps (in steps)",
    "lr_decay_iters": "phases.N.decay_fraction (a fraction of the phase)",
    "warmdown_ratio": "phases.N.decay_fraction",
    "adam_beta1": "phases.N.beta1",
    "adam_beta2": "phases.N.beta2",
    "adam_epsilon": "phases.N.eps",
    "grad_clip": "phases.N.clip",
    "gradient_clip": "phases.N.clip",
    "clip_grad": "phases.N.clip",
    "max_grad_norm": "phases.N.clip",
    "resume_from_checkpoint": "phases.N.init_from (a stopped run resumes on its own)",
    "init_checkpoint": "phases.N.init_from",
    # saving, evaluation, samples
    "save_steps": "checkpoint.every",
    "save_every": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "checkpoint_every": "checkpoint.every",
    "checkpoint_interval": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "eval_steps": "eval.every",
    "eval_every": "eval.every",
    "eval_interval": "eval.every",
    "eval_iters": "eval.tokens",
    "eval_tokens": "eval.tokens",
    "sample_every": "sample.every",
    "max_new_tokens": "sample.tokens (in rl: phases.N.rl.answer_tokens)",
    "max_completion_length": "phases.N.rl.answer_tokens",
    "num_generations": "phases.N.rl.samples_per_prompt",
    "group_size": "phases.N.rl.samples_per_prompt",
    "kl_coef": "phases.N.rl.kl",
    "reward_funcs": "phases.N.rl.tasks.N.reward",
    "lora_r": "phases.N.lora.rank",
    "r": "phases.N.lora.rank",
    "lora_rank": "phases.N.lora.rank",
    "lora_alpha": "phases.N.lora.alpha",
    "lora_dropout": "phases.N.lora.dropout",
    "target_modules": "phases.N.lora.targets",
    "lora_target_modules": "phases.N.lora.targets",
    "use_rslora": "phases.N.lora.rslora",
    "use_dora": "phases.N.lora.dora",
    "load_in_4bit": "phases.N.method (qlora)",
    "base_model": "model.from",
    "model_name_or_path": "model.from",
    "model_id": "model.from",
    "pretrained_model_name_or_path": "model.from",
    "gradient_checkpointing": "phases.N.recompute (all)",
    "activation_checkpointing": "phases.N.recompute (all)",
    "offload_optimizer": "phases.N.offload (optimizer)",
    "cpu_offload": "phases.N.offload (optimizer)",
    "deepspeed": _ZERO,
    "zero_stage": _ZERO,
    "zero_optimization": _ZERO,
    "test_fraction": f"phases.N.data.val_fraction {_HELD_OUT}",
    "test_size": f"phases.N.data.val_fraction {_HELD_OUT}",
    "test_split": f"phases.N.data.val_fraction {_HELD_OUT}",
    "test_mode": f"phases.N.steps {_TRIAL}",
    "debug_mode": f"phases.N.steps {_TRIAL}",
    "fast_dev_run": f"phases.N.steps {_TRIAL}",
    "max_train_samples": f"phases.N.steps {_TRIAL}",
    "train_on_inputs": "phases.N.kind (sft trains on answers only, mid with text trains on everything)",
    # the trainer
    "bf16": "train.precision (auto, fp32, bf16 or fp8)",
    "fp16": "train.precision (auto, fp32, bf16 or fp8)",
    "tf32": "train.precision (auto, fp32, bf16 or fp8)",
    "dtype": "train.precision",
    "mixed_precision": "train.precision",
    "torch_dtype": "train.precision",
    "attn_implementation": "train.attention",
    "flash_attention": "train.attention (auto benchmarks the kernels of the GPU)",
    "flash_attn": "train.attention (auto benchmarks the kernels of the GPU)",
    "use_flash_attention": "train.attention (auto benchmarks the kernels of the GPU)",
    "torch_compile": "train.compile",
    "use_compile": "train.compile",
    "cuda_graphs": "train.graphs",
    "use_cuda_graphs": "train.graphs",
    "logging_steps": "train.log_every",
    "log_interval": "train.log_every",
    "num_threads": "train.threads",
    "random_seed": "seed",
    "data_seed": "seed",
    # machines and costs
    "budget": "limits.spend",
    "max_cost": "limits.spend",
    "spend_limit": "limits.spend",
    "max_price": "limits.rate",
    "max_hourly_cost": "limits.rate",
    "max_duration": "limits.time",
    "timeout": "limits.time",
    "autostop": "limits.idle",
    "idle_timeout": "limits.idle",
    "idle_shutdown": "limits.idle",
    "training_phase": "train.only",
    "use_spot": "cloud.aws.spot",
    "no_spot": "cloud.aws.spot (false; on every cloud: launch --no-spot)",
    "gpu_type": "cloud.gpu",
    "accelerator": "cloud.gpu",
    "accelerators": "cloud.gpu",
    "gpus": "cloud.num_gpus",
    "gpu_count": "cloud.num_gpus",
    "n_gpus": "cloud.num_gpus",
    "provider": "cloud.providers",
    "backend": "cloud.providers",
    "run_name": "name",
    "experiment": "name",
    "experiment_name": "name",
    "run_experiment": "name",
    "output_dir": "store (the run directory itself needs no key)",
    "out_dir": "store (the run directory itself needs no key)",
    "bucket": "store (such as s3://BUCKET/PREFIX)",
    # sections
    "training": "phases (what is trained) or train (how the trainer runs)",
    "training_args": "phases (what is trained) or train (how the trainer runs)",
    "trainer": "train",
    "stages": "phases",
    "tokeniser": "tokenizer",
    "checkpointing": "checkpoint",
    "evaluation": "eval",
}


def suggest_key(path: tuple[str | int, ...]) -> str:
    """Return `Did you mean ...?` or another hint for an unknown key at this path."""
    # Import this here, because it loads the whole schema, which callers of `nearest` do not need.
    from homing.config.schema.keys import all_keys

    name = str(path[-1])
    section = ".".join("N" if isinstance(part, int) else part for part in path[:-1])
    here = _names_in(section)
    plain = name.lower().replace("-", "_").replace(" ", "_")
    if plain in here:
        return _mean(_full(section, plain), path)
    # A key of the same section that is one edit away takes precedence over every other suggestion.
    if near := _within(plain, here, 1):
        return _mean(_full(section, near), path)
    if plain in FOREIGN:
        return _mean(FOREIGN[plain], path)
    if joined := {name.replace("_", ""): name for name in FOREIGN}.get(plain.replace("_", "")):
        return _mean(FOREIGN[joined], path)
    elsewhere = [found.path for found in all_keys().values() if found.name == plain]
    if elsewhere:
        return "It belongs to " + " or ".join(_numbered(found, path) for found in elsewhere[:3]) + "."
    if near := nearest(plain, here):
        return _mean(_full(section, near), path)
    by_name = {found.name: found.path for found in reversed(all_keys().values())}
    if near := _within(plain, list(by_name), 1):
        return _mean(by_name[near], path)
    if near := nearest(plain, list(FOREIGN), cutoff=0.85):
        return _mean(FOREIGN[near], path)
    if near := nearest(plain, list(by_name), cutoff=0.75):
        return _mean(by_name[near], path)
    return f"{_ALL_OF_THEM}{', '.join(here)}." if here else f"There is no section {section} either."


def tidy_name(name: str) -> str:
    """Turn `name` into a valid run name; "" if it contains no usable character."""
    german = name.lower().translate({ord("ä"): "ae", ord("ö"): "oe", ord("ü"): "ue", ord("ß"): "ss"})
    letters = "".join(letter for letter in unicodedata.normalize("NFKD", german) if not unicodedata.combining(letter))
    return re.sub(r"[^a-z0-9]+", "-", letters).strip("-")[:32].strip("-")


def meant_keys(path: tuple[str | int, ...]) -> list[tuple[str | int, ...]]:
    """Return the valid keys and sections that `suggest_key` names as the ones the user may have meant."""
    from homing.config.schema.keys import all_keys, sections

    suggestion = suggest_key(path)
    words = [] if suggestion.startswith(_ALL_OF_THEM) else re.findall(r"[\w.]*\w", suggestion)
    named = [tuple(int(part) if part.isdigit() else part for part in word.split(".")) for word in words]
    plain = {name.removesuffix(".N") for name in (*all_keys(), *sections())}
    return [each for each in named if ".".join("N" if isinstance(part, int) else part for part in each) in plain]


def nearest(name: str, candidates: list[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate most similar to the name, or None if none is close."""
    if near := _within(name, candidates, 1 if len(name) < 5 else 2):
        return near
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)
    return close[0] if close else None


def _names_in(section: str) -> list[str]:
    """Return the names of the keys and sections allowed in this section."""
    from homing.config.schema.keys import all_keys, sections

    names = [found.name for found in all_keys().values() if found.section == section]
    prefix = f"{section}." if section else ""
    inner = [found.removeprefix(prefix).split(".")[0] for found in sections() if found and found.startswith(prefix)]
    return [name for name in dict.fromkeys(names + inner) if name != "N"]


def _full(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _mean(ours: str, path: tuple[str | int, ...]) -> str:
    return f"Did you mean {_numbered(ours, path)}?"


def _numbered(ours: str, path: tuple[str | int, ...]) -> str:
    """Replace N in a key such as phases.N.lr with the index that `path` has for that list, or 0 if `path` has none."""
    numbers = {before: part for before, part in pairwise(path) if isinstance(part, int)}
    return re.sub(r"(\w+)\.N\b", lambda found: f"{found[1]}.{numbers.get(found[1], 0)}", ours)


def _within(name: str, candidates: list[str], most: int) -> str | None:
    # Among equally close candidates, prefer one with the same first letter, because typos in that letter are rarer.
    scored = [(_edits(name, candidate), name[:1] != candidate[:1], candidate) for candidate in candidates]
    best = min(scored, default=None)
    return best[2] if best and best[0] <= most else None


def _edits(a: str, b: str) -> int:
    """Return the edit distance: letters changed, dropped, added, or swapped with a neighbor. 3 means 3 or more."""
    if abs(len(a) - len(b)) > 2:
        return 3
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, start=1):
        above, before_above = row, before
        row = [i]
        for j, other in enumerate(b, start=1):
            cost = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, before_above[j - 2] + 1)
            row.append(cost)
        before = above
    return row[-1]
