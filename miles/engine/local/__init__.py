"""Our embedded engine: SGLang's native HTTP dialect in, sampled token ids with log-probs and version spans out.

One process, two threads. Everything reaches the step thread as a command, and commands are applied between two steps:

     HTTP ──▶ service ──commands──▶ engine: schedule ▸ one forward ▸ sample ▸ end what ended ──┐
     (event loop)  ▲                         (step thread)                                     │
                   └────────────────── ended sequences, one hand-over per step ◀───────────────┘

| waits                | for                                      | woken by                                  |
|----------------------|------------------------------------------|-------------------------------------------|
| step thread          | a command, or a request that may run     | `StepThread.post`                         |
| `POST /generate`     | the end of its sequence, or its client's | the hand-over; the disconnect             |
| a control endpoint   | its command, done between two steps      | the command's future                      |
| a waiting sequence   | a free row in the KV cache               | the end of another, seen at the next step |

Plain PyTorch on the CPU; nothing is compiled.
"""
