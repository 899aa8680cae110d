"""Reinforcement learning with verifiable rewards: prompts -> samples -> rewards -> advantages -> weighted targets.

    questions    questions from files, or generated, their order, and whether an answer is right
    tasks        the tasks of a phase, and rewards for samples: a built-in rule, or a custom `reward`
    rollout      all samples of a step in one batch, with a KV cache: `named_random`, `calculator`
    grpo         samples -> training rows; rewards -> loss weights of tokens
    rl_metrics   metrics of each step, and detection of a collapse

The keys of `phases[i].rl` (in a phase of kind `rl`), which have the same names in run.json, in base units:

    key                  default  range                meaning
    tasks                -        1 or more            the tasks; each is a mapping of the task keys below
    prompts_per_step     16       1 to 4096            questions in one step
    samples_per_prompt   16       2 to 1024            answers to each question; their rewards are compared
    answer_tokens        256      1 to context - 8     a longer answer is cut off and counts as truncated;
                                                       half the context if that is less than 256
    temperature          1.0      over 0 to 5          sampling temperature; 1: sample from the loss's distribution
    top_k                0        0 or more            sample only from the k most likely tokens; 0: from all
    advantage            std      std | mean           reward minus the group's mean, divided by its standard deviation
                                                       (std, GRPO) or not (mean, Dr. GRPO)
    kl                   0.0      0 to 10              KL penalty towards the phase's initial weights; 0: no penalty,
                                                       and no second copy of the weights in memory
    updates_per_rollout  1        1 to 16              optimizer steps per set of samples; 1: new samples for each step
    clip_low, clip_high  0.2,0.2  low over 0, under 1  how far a token's probability ratio may move, down and up, before
                                  high over 0 to 10    it is clipped; has no effect unless updates_per_rollout is over
                                                       1, so setting it otherwise is an error
    pass_reward          1.0      any                  a reward of this or more counts as passed in pass@k
    eval_prompts         64       1 to 100000          number of held-out questions in each evaluation
    eval_samples         4        1 to 1024            answers to each held-out question: k of pass@k
    rollout_rows         0        0 or more            samples generated at a time; 0: all samples of a step at once;
                                                       if memory runs out, homing halves this and reports it
    graphs               auto     auto | on | off      generate each token with a captured CUDA graph; auto: on CUDA,
                                                       but if capturing fails, report it and continue without graphs
    collapse_steps       20       2 or more            report a collapse after it has lasted this many steps
    reward_timeout       10s      over 0 to 600 s      time limit of a custom reward's call (run.json: reward_timeout_s)
    reward_memory        2GiB     64 MiB to 1 TiB      memory limit of a custom reward (run.json: reward_memory_bytes)

    tasks[j]             default  for                  meaning
    kind                 -        all                  gsm8k | arithmetic | spelling | prompts
    weight               1.0      all                  the task's share of prompts, relative to other tasks (over 0)
    file                 -        gsm8k, prompts       JSON lines: question and answer (gsm8k); prompt, messages or ids,
                                                       and answer (prompts). Sent with the run, checked by hash
    val_file             ""       gsm8k, prompts       held-out lines in the same format; "": a tenth of `file` is held
                                                       out, selected by the question's hash
    difficulty           1        arithmetic, spelling 1 to 5; 1: one-digit sums, words of three letters
    calculator           auto     gsm8k, arithmetic    auto | on | off: evaluate the text between <|tool_call|> and
                                                       <|tool_call_end|> and give the result to the model.
                                                       auto: on for gsm8k if the tokenizer has the tool tokens
    reward               ""       all                  a reward.py with `def reward(prompt, completion, answer)`; needed
                                                       for prompts without answers. Sent with the run, checked by hash

In run.json: `Phase.rl: Optional[Rl]`, and in each RlTask `file`, `val_file`, `reward` are paths (relative to the data
folder) with `file_sha256`, `val_file_sha256`, `reward_sha256` ("": not checked). Resuming a checkpoint requires the
same values of all keys except rollout_rows, graphs, collapse_steps, eval_*, reward_timeout and reward_memory. A good
learning rate is a twentieth of the pretraining rate, decaying to 0, with no weight decay; batch_tokens is prompts x
samples x answer_tokens.
"""
