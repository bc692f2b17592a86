"""DeepSpeed 0.19.8: torch_autocast in float16 has two loss scales, and a step uses the wrong one.

Run with torchrun --nproc_per_node 2 and a new folder as its argument. Prints six consequences. The loss is multiplied
by the scale of a torch.amp.GradScaler, initially 65536; the scale that DeepSpeed itself uses is 1.
"""

import sys

import deepspeed
import torch

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # prevents compiling a kernel
deepspeed.init_distributed("gloo")


def train(stage, inputs, layers=1, growth_interval=2000, **settings):
    """Train on inputs, of which 6.0 overflows; return the engine, scales, gradient norms at steps, rounded biases."""
    model = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(layers))
    model.forward = lambda x: sum(layer(x).float() for layer in model) / 4
    torch.nn.init.constant_(model[0].bias, 0.1)
    scales, stepped, rounded = [], [], []
    model[0].register_forward_hook(lambda layer, *_: rounded.append(torch.equal(layer.bias, layer.bias.half().float())))
    optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in model], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: stepped.extend(norms(optimizer)))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    settings |= {"train_micro_batch_size_per_gpu": 1, "torch_autocast": {"enabled": True, "dtype": "float16"}}
    settings |= {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings)
    scaler = engine.optimizer.torch_autocast_gradscaler if stage else engine.torch_autocast_z0_gradscaler
    scaler.set_growth_interval(growth_interval)
    for number in inputs:
        engine.backward(engine(torch.full((1, 1), number)).sum())
        engine.step()
        scales.append(scaler.get_scale())
    return engine, scales, stepped, rounded


def norms(optimizer):
    return [parameter.grad.norm().item() for group in optimizer.param_groups for parameter in group["params"]]


def tell(*words):
    if torch.distributed.get_rank() == 0:
        print(*words)


tell("deepspeed", deepspeed.__version__, "- torch", torch.__version__)
tell("1. scales after a step that overflowed, stages 0 to 3:", *(train(stage, [6.0])[1] for stage in range(4)))
tell("2. a gradient clipped to 0.125 is stepped with as", train(2, [1.0], gradient_clipping=0.125)[2])
tell("3. equal gradients of three groups are stepped with as", train(1, [1.0], 3, 2, gradient_clipping=0.0)[2])
engine, scales, *_ = train(0, [6.0])
tell("4. the rate of 1.0 after a step that was skipped:", engine.get_lr())
engine.save_checkpoint(sys.argv[1])
other = train(0, [])[0]
other.load_checkpoint(sys.argv[1])
tell("5. the scale", *scales, "is loaded as", other.torch_autocast_z0_gradscaler.get_scale())
tell("6. is the bias of 0.1 rounded to float16 in a forward?", train(3, [0.3, 0.3, 6.0, 0.3, 0.3])[3])
