import numpy as np, pytest, edge, contextlib, time
from tests.support.family_sizes import MORE_FAMILIES, WITH_PICTURES
from tests.support import checkpoints, family_sizes
from tests.support.processes import cluster_of_daemons
from tests.support.plans import make_plan
@pytest.fixture(autouse=True)
def rates(): pass
@pytest.fixture(scope="module")
def cluster(nothing_left_running_by_the_module, tmp_path_factory):
    folder = tmp_path_factory.mktemp("daemons")
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(cluster_of_daemons(folder, ("--backend","webgpu")))
FAMS="mixtral qwen3_moe gpt_oss gemma4_moe deepseek_v3 glm4_moe glm4_moe_lite lfm2_moe qwen2_moe qwen3_5_moe qwen3_next".split()
@pytest.mark.parametrize("family",FAMS)
def test_f(cluster, tiny_checkpoint, family):
    t=time.time()
    c=tiny_checkpoint(family)
    prompt=c.prompt(24)
    plan = make_plan(c.spec, "solo", model=c.path.name)
    with cluster.load(c.path, dtype="float32", plan=plan) as model:
        logits=model.logits(prompt); 
        r=model.generate(prompt,max_new_tokens=16)
    print("DIFF",family,np.abs(logits-c.logits(prompt)).max(), round(time.time()-t,1))
    c.check_greedy(prompt,r.token_ids,16)
    assert np.abs(logits-c.logits(prompt)).max()<1e-3
