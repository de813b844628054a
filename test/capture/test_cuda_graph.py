"""Replayed calls against plain ones, with a fake recorder on CPU and the real one on a GPU."""

import pytest
import torch

from torchrl_marl.capture import CudaGraph, capture, program, trace
from torchrl_marl.capture.cuda_graph import CudaRecorder, written_inputs
from torchrl_marl.errors import CaptureError


class FakeRecorder:
    """Imitates a CUDA graph on a CPU: fixed memory, no execution while recording, reused outputs.

    Recorders of one ``pool`` overwrite each other's outputs, as graphs that share memory may.
    """

    def __init__(self, pool=None):
        self.pool = [] if pool is None else pool

    def warm_up(self, function, inputs):
        return function(*inputs)

    def record(self, function, inputs):
        memory = [x.detach() for x in inputs]
        before = [x.clone() for x in memory]
        outputs = [x.detach() for x in function(*memory)]
        for x, old in zip(memory, before):
            if not torch.equal(x, old):
                x.copy_(old)
        addresses = {x.data_ptr() for x in memory}
        own = [i for i, x in enumerate(outputs) if x.data_ptr() not in addresses]
        for i in own:
            outputs[i].fill_(-77)
        self.pool.append([outputs[i] for i in own])
        mine = self.pool[-1]

        def replay():
            found = function(*memory)
            for others in self.pool:
                for x in others if others is not mine else ():
                    x.fill_(-77)
            for i in own:
                outputs[i].copy_(found[i])

        return outputs, replay


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BACKENDS = ["fake", pytest.param("cuda", marks=ON_GPU)]


@pytest.fixture(params=BACKENDS)
def backend(request):
    """The device, and a function that makes recorders; recorders of one pool share memory."""
    if request.param == "fake":
        return torch.device("cpu"), FakeRecorder
    device = torch.device("cuda", torch.cuda.current_device())
    return device, lambda pool=None: CudaRecorder(device, pool)


def adam(param, grad, moment, step):
    """Updates all but the gradient in place, as a fused optimizer does."""
    step.add_(1.0)
    moment.mul_(0.9).add_(grad, alpha=0.1)
    param.sub_(moment / (1.0 - 0.9**step), alpha=0.5)
    return [param.square().sum()]


def state(device):
    return [torch.ones(3, device=device), torch.zeros(3, device=device)], torch.zeros(
        (), device=device
    )


def gradients(device, n=6):
    return [torch.full((3,), i + 1.0, device=device) for i in range(n)]


@pytest.mark.parametrize("warmup", [1, 2, 4])
@pytest.mark.parametrize("mutated", [None, {0, 2, 3}])
def test_every_call_has_its_effect_once(backend, warmup, mutated):
    """Warm-up and recording do not change the state of an optimizer."""
    device, recorder = backend
    (param, moment), step = state(device)
    (own_param, own_moment), own_step = state(device)
    run = CudaGraph(adam, mutated=mutated, warmup=warmup, recorder=recorder())
    for i, grad in enumerate(gradients(device)):
        (found,) = run(param, grad, moment, step)
        (wanted,) = adam(own_param, grad, own_moment, own_step)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close([param, moment, step], [own_param, own_moment, own_step])
        assert step.item() == i + 1
    # Only the gradient is copied, as it is a new tensor in each call.
    assert run.buffered == [1] and run.n_recorded == 1


def test_input_at_a_new_address_is_copied_in_and_back(backend):
    device, recorder = backend
    run = CudaGraph(adam, mutated={0, 2, 3}, recorder=recorder())
    (own_param, own_moment), own_step = state(device)
    for grad in gradients(device):
        # Each call gets the state in new memory, and must write to it.
        param, moment, step = (x.clone() for x in (own_param, own_moment, own_step))
        run(param, grad, moment, step)
        adam(own_param, grad, own_moment, own_step)
        torch.testing.assert_close([param, moment, step], [own_param, own_moment, own_step])
    assert run.buffered == [0, 1, 2, 3] and run.n_recorded == 1


def test_input_with_a_new_address_after_recording_is_rerecorded(backend):
    """It is recorded again once; the tensor at the old address is not changed."""
    device, recorder = backend
    (param, moment), step = state(device)
    run = CudaGraph(adam, mutated={0, 2, 3}, recorder=recorder())
    for grad in gradients(device):
        run(param, grad, moment, step)
    assert run.buffered == [1]
    other, before = param.clone(), param.clone()
    wanted = [x.clone() for x in (param, moment, step)]
    for grad in gradients(device, 3):
        run(other, grad, moment, step)
        adam(wanted[0], grad, *wanted[1:])
        torch.testing.assert_close([other, moment, step], wanted)
    assert run.buffered == [0, 1] and run.n_recorded == 2
    assert torch.equal(param, before)
    # The first tensor again is copied, without a third recording.
    run(param, gradients(device)[0], moment, step)
    adam(before, gradients(device)[0], *wanted[1:])
    torch.testing.assert_close([param, moment, step], [before, *wanted[1:]])
    assert run.n_recorded == 2


def test_parameter_with_new_data_is_rerecorded(backend):
    device, recorder = backend
    param = torch.nn.Parameter(torch.ones(3, device=device))
    run = CudaGraph(lambda x: [x.mul_(2.0).sum()], recorder=recorder())
    for _ in range(3):
        run(param)
    param.data = torch.ones(3, device=device)
    for wanted in (2.0, 4.0):
        (total,) = run(param)
        assert total.item() == 3 * wanted and param.tolist() == [wanted] * 3
    assert run.n_recorded == 2


def test_forget_allows_other_shapes(backend):
    device, recorder = backend
    run = CudaGraph(lambda x: [x + 1.0], recorder=recorder())
    for _ in range(4):
        run(torch.zeros(2, device=device))
    run.forget()
    x = torch.zeros(5, device=device)
    for _ in range(4):
        (out,) = run(x)
    assert out.tolist() == [1.0] * 5
    assert run.buffered == [] and run.n_recorded == 2


# ------------------------------------------------------------------------------------ outputs


def test_cloned_outputs_are_not_overwritten(backend):
    device, recorder = backend
    run = CudaGraph(lambda x: [x + 1.0], recorder=recorder())
    outs = [run(torch.full((2,), float(i), device=device))[0] for i in range(6)]
    assert [x[0].item() for x in outs] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_static_outputs_are_overwritten(backend):
    device, recorder = backend
    run = CudaGraph(lambda x: [x + 1.0], outputs="static", recorder=recorder())
    outs = [run(torch.full((2,), float(i), device=device))[0] for i in range(5)]
    assert [x[0].item() for x in outs] == [1.0, 2.0, 5.0, 5.0, 5.0]
    assert outs[-1].data_ptr() == outs[-2].data_ptr()


@pytest.mark.parametrize("outputs", ["static", "clone"])
def test_output_may_be_the_next_input(backend, outputs):
    device, recorder = backend
    run = CudaGraph(lambda x: [x * 2.0], mutated=(), outputs=outputs, recorder=recorder())
    x = torch.ones(2, device=device)
    for _ in range(8):
        (x,) = run(x)
    assert x.tolist() == [256.0, 256.0]


def test_output_may_alias_an_input(backend):
    device, recorder = backend
    run = CudaGraph(lambda x, y: [x.add_(y), x[0]], mutated={0}, recorder=recorder())
    for i in range(5):  # the first input has a new address in each call, and is buffered
        x, y = torch.zeros(2, device=device), torch.full((2,), float(i), device=device)
        out, first = run(x, y)
        assert out.tolist() == x.tolist() == [i, i] and first.item() == i
        assert out.data_ptr() == x.data_ptr()


def test_expanded_inputs(backend):
    device, recorder = backend
    run = CudaGraph(lambda x: [x.sum(1)], mutated=(), recorder=recorder())
    for i in range(5):
        (out,) = run(torch.arange(3.0, device=device).add(i).unsqueeze(1).expand(3, 4))
        assert out.tolist() == [4.0 * i, 4.0 * i + 4, 4.0 * i + 8]


def test_several_graphs_share_memory(backend):
    device, recorder = backend
    pool = [] if device.type == "cpu" else torch.cuda.graph_pool_handle()
    double = CudaGraph(lambda x: [x * 2.0], outputs="static", recorder=recorder(pool))
    plus = CudaGraph(lambda x: [x + 1.0], outputs="clone", recorder=recorder(pool))
    for i in range(6):
        x = torch.full((4,), float(i), device=device)
        (y,) = double(x)
        (z,) = plus(y)
        assert z.tolist() == [2.0 * i + 1] * 4


@ON_GPU
def test_random_numbers_advance_between_replays():
    x = torch.zeros(8, device="cuda")
    run = CudaGraph(lambda x: [x + torch.rand_like(x)])
    torch.manual_seed(3)
    found = [run(x)[0] for _ in range(6)]
    torch.manual_seed(3)
    wanted = [x + torch.rand_like(x) for _ in range(6)]
    torch.testing.assert_close(found, wanted)


# ----------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("n_calls", [1, 4], ids=["warm-up", "replay"])
def test_inputs_of_other_shapes_raise(backend, n_calls):
    device, recorder = backend
    run = CudaGraph(lambda x, y: [x + y], recorder=recorder(), name="the sum")
    x, y = torch.ones(2, 3, device=device), torch.ones(2, 3, device=device)
    for _ in range(n_calls):
        run(x, y)
    with pytest.raises(CaptureError, match=r"the sum .*input 1 as torch.float32 \[2, 3\].*\[3\]"):
        run(x, y[0])
    with pytest.raises(CaptureError, match="torch.float64"):
        run(x, y.double())
    with pytest.raises(CaptureError, match=r"strides \[1, 2\]"):
        run(x, torch.ones(3, 2, device=device).T)
    with pytest.raises(CaptureError, match="with 2 inputs and is called with 1"):
        run(x)
    assert run(x, y)[0].tolist() == [[2.0] * 3] * 2


def test_strides_of_dims_of_one_do_not_matter(backend):
    device, recorder = backend
    run = CudaGraph(lambda x: [x + 1.0], recorder=recorder())
    for i in range(4):
        x = torch.ones(1, 3, device=device)
        run(x if i % 2 else torch.ones(4, 3, device=device)[::2][:1])


def test_cpu_inputs_raise():
    with pytest.raises(CaptureError, match="the sum: .*on one GPU, they are on cpu"):
        CudaGraph(lambda x: [x + x], name="the sum")(torch.ones(2))
    on_two = (torch.ones(2), torch.ones(2, device="meta"))
    with pytest.raises(CaptureError, match="they are on cpu, meta"):
        CudaGraph(lambda x, y: [x + y], recorder=FakeRecorder())(*on_two)


def test_buffered_inputs_that_share_memory_raise(backend):
    device, recorder = backend
    run = CudaGraph(lambda x, y: [x.add_(1.0), y * 2.0], mutated={0}, recorder=recorder())
    with pytest.raises(CaptureError, match="inputs 0 and 1 share memory"):
        for _ in range(3):
            x = torch.ones(4, device=device)
            run(x, x[1:])


def test_failed_recording_raises():
    class Refuses(FakeRecorder):
        def record(self, function, inputs):
            raise RuntimeError("operation not permitted when stream is capturing")

    run = CudaGraph(lambda x: [x + 1], recorder=Refuses(), name="the step", warmup=1)
    run(torch.ones(2))
    with pytest.raises(CaptureError, match="the step cannot be recorded .*not permitted"):
        run(torch.ones(2))


@pytest.mark.parametrize("wrong", [{"warmup": 0}, {"outputs": "view"}])
def test_invalid_arguments_raise(wrong):
    with pytest.raises(ValueError, match="expected"):
        CudaGraph(lambda x: [x], **wrong)


# ----------------------------------------------------------------------------- as a program


def test_program_is_compiled_and_replayed(backend, monkeypatch):
    device, recorder = backend
    graphs = []

    def with_recorder(*args, **kwargs):
        graphs.append(CudaGraph(*args, recorder=recorder(), **kwargs))
        return graphs[-1]

    monkeypatch.setattr(program, "CudaGraph", with_recorder)

    def step(data, x):
        assert (x < 4).all()
        data["n"] += 1.0
        data["sum"].add_(x)
        return {"mean": data["sum"] / data["n"]}

    def fresh():
        return {"n": torch.zeros((), device=device), "sum": torch.zeros(3, device=device)}

    data, own, x = fresh(), fresh(), torch.ones(3, device=device)
    run = capture(step, data, x, name="a mean", execution="cudagraph")
    data = fresh()
    for i in range(5):
        x = torch.full((3,), float(i), device=device)
        out = run(data, x)
        if i < 4:
            torch.testing.assert_close(out, step(own, x))
            torch.testing.assert_close(data, own)
            run.raise_failed()
    with pytest.raises(CaptureError, match=r"assert \(x < 4\)\.all\(\)"):
        run.raise_failed()
    assert graphs[0].buffered == [2] and graphs[0].n_recorded == 1


def test_program_that_synchronizes_raises():
    with pytest.raises(CaptureError, match=r"a copy cannot be a CUDA graph.*\n1 x upload"):
        capture(lambda x: x.to("meta"), torch.ones(2), name="a copy", execution="cudagraph")


# -------------------------------------------------------------------- mutated inputs of a graph


def test_written_inputs():
    def step(param, grad, moments, flag):
        param[1:].view(-1).mul_(0.9).add_(grad[1:].flatten())
        torch._foreach_add_(moments, 1.0)
        own = grad.clone()
        own.zero_()
        return own + flag.split(1)[0]

    grad, moments = torch.ones(3, 2), [torch.ones(2), torch.ones(2)]
    param, flag = torch.ones(3, 2), torch.ones(2)
    module = trace(step, param, grad, moments, flag).module
    assert written_inputs(module) == {0, 2, 3}


def test_written_parts_of_a_split():
    def step(x, y):
        first, second = x.split(2)
        second.add_(y)
        return first + 0.0

    assert written_inputs(trace(step, torch.ones(4), torch.ones(2)).module) == {0}


def test_unknown_functions_count_as_writing():
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output([graph.call_function(adam, ([x],)), y])
    assert written_inputs(torch.fx.GraphModule({}, graph)) == {0}
