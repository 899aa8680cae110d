"""The defects that `regressions.py` checks: a short name for each, and what went wrong.

A test names the defect it shows with `@pytest.mark.regression("name")`. It must use only what the old sources already
had (modules, functions, parameters, commands), so that it fails there for the right reason.
"""

from __future__ import annotations

__all__ = ["DEFECTS"]

DEFECTS = {
    # --- money and safety ---
    "provider-figures": "An absurd number from a provider kept guard and destroy from sending the request to end.",
    "lost-ledger": "With a lost ledger, verbs said that nothing was billing, and launch rented a second instance.",
    "broken-home": "A read-only, damaged or full home disabled every verb.",
    "dotenv": "A .env file in the current folder could redirect API keys and run code.",
    "unverified-code": "The instance ran code from the store before its hash was checked.",
    "guard-without-keys": "A guard that had no API key counted as armed.",
    "preempted-not-stopped": "A preempted run was recorded as stopped on request and never resumed.",
    "serve-long-prompts": "serve tokenized prompts of any size before they entered the queue.",
    "terminal-escapes": "Escape sequences from a store reached the terminal.",
    "template-bombs": "A chat template could hang or exhaust the memory of the process.",
    "tokenizer-regex": "A hostile regular expression in a tokenizer ended the process with a panic.",
    "wheel-contents": "The wheel for the instance included every file in the package folder.",
    "home-permissions": "Other users of the computer could read the ledger and the home folder.",
    "crash-secrets": "API keys appeared in crash output.",
    "instance-hashes": "The instance installed packages without checking their hashes.",
    "large-records": "Verbs took minutes and gigabytes with many ledger lines or metrics.",
    "clock-set-back": "After the clock was set back, a name meant an older run.",
    "absurd-bills": "One absurd bill or tag was written to the ledger, or made a whole provider unreadable.",
    "store-lost": "A run trained on to its limit without any chance to save, and could be `done` without a model.",
    "clock-jumps": "A jump of the wall clock ended a healthy run.",
    "bad-ledger-row": "One unreadable ledger row broke the verbs for all runs.",
    "stale-shards": "plan, verify and launch accepted shards made from other text than the run file names.",
    "looking-writes": "Verbs that only look at runs failed on a full disk, because they wrote.",
    "slow-connections": "Connections that send their headers slowly exhausted serve and the dashboard.",
    "decompression-bombs": "Small hostile data files took quadratic time or gigabytes of memory.",
    "reward-deadline": "A reward hook could evade its deadline and leave processes running.",
    "spend-limit-size": "An enormous spend limit ended in a traceback.",
    "utf16-jsonl": "JSONL in UTF-16 was reported as invalid JSON, without the cause.",
    "template-symlink": "A chat template that links outside its folder was followed.",
    "destroyed-while-launching": "A launch that was destroyed meanwhile said that it had started.",
    # --- correctness ---
    "export-prompt": "Exporting a swift model asked a question on the terminal and ignored the answer.",
    "export-bos": "lm-eval added a second begin-of-text token to exported models.",
    "architecture-refusals": "Refusals of unsupported architectures listed irrelevant keys.",
    "partial-rotary": "partial_rotary_factor was refused in one place and ignored in another.",
    "rope-theta-zero": "rope_theta: 0 silently became 10000.",
    "form-feed": "Chat data skipped conversations with a form feed, which plain text keeps.",
    "leading-newlines": "Leading newlines of an answer merged into the header and were never learned.",
    "first-failed-rank": "The wrong rank was blamed for a failure.",
    # --- code that only runs on a GPU ---
    "rope-gradients": "q/k/v gradients were wrong at micro-batch 1 with non-contiguous gradients.",
    "attention-race-memory": "The attention race ran out of memory at long contexts.",
    "masked-gqa": "Masked or cached grouped-query attention fell back to quadratic math.",
    "rl-row-lengths": "RL fell back to eager execution after 8 row lengths.",
    "fp8-rows": "FP8 failed when the number of tokens was not a multiple of 16.",
    "loss-without-triton": "The loss imported Triton unconditionally.",
    "device-index": "--device cuda:1 launched kernels on device 0.",
    "compile-failure-ranks": "One rank's compile failure left the other ranks waiting for hours.",
    "deterministic-starts": "train.deterministic was not reproducible across fresh starts.",
    "gpu-probe": "The probe looked at GPU 0 only, and more ranks than GPUs ended in a raw CUDA error.",
    "peak-memory": "Peak-memory statistics were not reset between phases.",
    "empty-cache": "empty_cache ran with the garbage collector off and freed less than it could.",
    # --- day one with a real account ---
    "gpu-names": "GPUs that the providers sell were unknown by the names in their catalogues.",
    "unknown-gpu-as-cpu": "plan rated an unknown GPU as a processor: 92 tok/s, 316 days.",
    "old-gpus-offered": "GPUs older than our torch supports (V100) were offered on some providers.",
    "aws-permissions": "The AWS permissions we listed lacked iam:TagRole and two more.",
    "runpod-probe": "A RunPod pod that could end itself by GraphQL only was refused; the probe knew REST v2 alone.",
    "runpod-image-torch": "RunPod's default image had a torch out of our range, so each boot installed a second one.",
    "runpod-hosts-by-cuda": "RunPod hosts with drivers older than CUDA 13.0 were excluded, though they get a wheel.",
    "older-driver-wheel": "A torch of the image that was too new for the driver was used and saw no GPU.",
    "second-guard": "Shadeform's quick start stopped at `Only one guard`; a person had to start the second one.",
    "hub-xet": "Hub stores used Xet in a real run, which every test turned off.",
    "preset-4b-memory": "The preset 4b did not fit a GPU of 80 GB: 81.73 GB needed, 80.75 available.",
    # --- figures and claims ---
    "better-gpu-rated-slower": "plan rated an H100 above an H200, which is at least as good in every figure.",
    "linear-scaling-unsaid": "plan multiplied one GPU's speed by their number and did not say so of modelled rows.",
    "goethe-hours": "The preset goethe-75m promised under an hour on a consumer card; the plan says two.",
    "help-json": "homing --help --json was refused, and the error suggested the same option.",
    # --- the first hour ---
    "name-means-newest-finished": "A run stopped at step 1 replaced the finished model; a second launched one did not.",
    "refused-fixes": "The fix of a usage error kept refused options or named something else: --step 5 became --set 5.",
    "local-billing-alarm": "A run on this computer, which nobody charges for, raised billing alarms.",
    "orphaned-trainer": "kill -9 of homing train left its trainer running.",
    "export-mode": "Exported weights could be read by their owner alone.",
    "report-headers": "Headers of tables in report pages broke inside words.",
    "data-show-tokenizer": "data show FILE took the tokenizer of the newest run, also of one that is not prepared.",
    "stored-removal": "destroy --stored did not say what it removed, and a later verb wrote record.json back.",
    "ledger-margin": "The ledger was silent about a difference beyond its stated margin.",
    "shell-completion": "Completion knew no run names and keys, and its installation edited files without asking.",
    "probe-under-load": "plan probed the CPU once and kept that, however busy the computer was.",
}
