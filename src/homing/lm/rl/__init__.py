"""Reinforcement with rewards that can be checked: prompts -> samples -> rewards -> advantages -> weighted targets.

    settings    the keys below, checked                order     which question is asked when
    tasks       what is asked: questions, generated    judging   samples to rewards: answers, or reward, one's own
    rollout     all samples of a step in one batch, with a KV cache: decode, draws, calculator, lean
    grpo        rewards to what each token counts      experience  samples as rows to learn from
    watch       what is logged, and when it has collapsed

The keys of `phases[i].rl` (a phase of kind `rl`; method full), and of run.json by the same names in base units:

    key                  default  range                what it says
    tasks                -        1 or more            what is asked; a list of the task keys below
    prompts_per_step     16       1 to 4096            questions in one step
    samples_per_prompt   16       2 to 1024            answers to each: the group that an answer is compared with
    answer_tokens        256      1 to context - 8     an answer longer than this is cut off and counts as truncated;
                                                       half the context where that is less than 256
    temperature          1.0      over 0 to 5          of sampling; 1 samples what the loss computes
    top_k                0        0 or more            sample among the likeliest k tokens only; 0: among all
    advantage            std      std | mean           reward minus the group's mean, divided by its deviation (std,
                                                       GRPO) or not (mean, Dr. GRPO)
    kl                   0.0      0 to 10              pull towards the weights that the phase began with; 0: none, and
                                                       no second copy of the weights in memory
    updates_per_rollout  1        1 to 16              optimizer steps on one set of samples; 1: always on fresh ones
    clip_low, clip_high  0.2,0.2  over 0, under 1 /10  how far a token's probability may have moved, down and up, and
                                                       still be learned from; set without updates_per_rollout over 1
                                                       they are not in effect, which is an error
    pass_reward          1.0      any                  a reward of this or more counts as passed in pass@k
    eval_prompts         64       1 to 100000          held-out questions in an evaluation
    eval_samples         4        1 to 1024            answers to each: k of pass@k
    rollout_rows         0        0 or more            samples made at a time; 0: all of a step, halved aloud when the
                                                       memory does not hold them
    graphs               auto     auto | on | off      one captured CUDA graph for each new token; auto: where there is
                                                       a CUDA card, and aloud without where capturing fails
    collapse_steps       20       2 or more            a collapse is said when it has gone on for so many steps
    reward_timeout       10s      over 0 to 600 s      for one call of one's own reward (run.json: reward_timeout_s)
    reward_memory        2GiB     64 MiB to 1 TiB      of its process (run.json: reward_memory_bytes)

    tasks[j]             default  for                  what it says
    kind                 -        all                  gsm8k | arithmetic | spelling | prompts
    weight               1.0      all                  its share of the prompts, against the other tasks' (over 0)
    file                 -        gsm8k, prompts       JSON lines: question and answer (gsm8k); prompt, messages or ids,
                                                       and answer (prompts). Travels with the run, by its hash
    val_file             ""       gsm8k, prompts       held-out lines of the same form; without it a tenth of `file`,
                                                       by the hash of the question
    difficulty           1        arithmetic, spelling 1 to 5; 1: one-digit sums, words of three letters
    calculator           auto     gsm8k, arithmetic    auto | on | off: what stands between <|tool_call|> and
                                                       <|tool_call_end|> is computed and told to the model. auto: on
                                                       for gsm8k where the tokenizer has the tool tokens
    reward               ""       all                  a reward.py with `def reward(prompt, completion, answer)`; needed
                                                       by a task of prompts without answers. Travels by its hash

In run.json: `Phase.rl: Optional[Rl]`, and in each RlTask `file`, `val_file`, `reward` are paths (a relative one starts
in the data folder) with `file_sha256`, `val_file_sha256`, `reward_sha256` ("": not checked). A checkpoint belongs to
all keys but rollout_rows, graphs, collapse_steps, eval_*, reward_timeout and reward_memory. Good rates for the phase
are a twentieth of pretraining's, falling to 0, without weight decay; batch_tokens is prompts x samples x
answer_tokens.
"""
