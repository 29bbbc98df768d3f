// -- what the page and the tests call

// flags: {name: value} over the defaults of train.py. Throws a ValueError that names the fix.
function config_of(flags) {
  const cfg = {};
  for (const [name, said] of Object.entries(DATA.flags)) cfg[name] = said.value;
  Object.assign(cfg, flags);
  for (const [name, said] of Object.entries(DATA.flags)) {
    const [low, high] = said.range;
    if (typeof cfg[name] === "number" && said.range.length && !(low <= cfg[name] && cfg[name] <= high)) {
      throw ValueError(`--${name.replaceAll("_", "-")} ${cfg[name]} must be at least ${low}, at most ${high}`);
    }
  }
  check_heads(cfg);
  if (cfg.objective === "mlm") check_masked_model(cfg);
  check_experts(cfg);
  check_adapters(cfg);
  check_sharing(cfg);
  check_precision(cfg);
  return cfg;
}

// Numbers, text, lists and plain objects, for a page or JSON.
function plain(x) {
  if (x instanceof Dict) return Object.fromEntries(x.items().map(([k, v]) => [k, plain(v)]));
  if (Array.isArray(x)) return Array.from(x, plain);
  return typeof x === "bigint" ? Number(x) : x;
}

function plan(flags, gpus, gpu, vocab) {
  const [cfg] = check_gpus(config_of(flags), gpus);
  const found = estimate(cfg, gpus, gpu, vocab);
  const causes = warnings(cfg, found, gpu, vocab);
  const uneven = uneven_ms(cfg, gpus, gpu, vocab);
  return { ...plain(found), ms_uneven: uneven, warnings: plain(causes) };
}

function pictures(flags, gpus) {
  const [cfg, mesh] = check_gpus(config_of(flags), gpus);
  const count = micro_batches(cfg, mesh);
  return { ranks: cfg.pp, chunks: cfg.pp_chunks, count, idle: bubble(cfg.pp, cfg.pp_chunks, count),
    table: plain(timetable(cfg.pp, cfg.pp_chunks, Math.min(count, 24))) };
}

return { plan, pictures, DATA, ValueError, gpus: plain(GPUS),
  layouts: (flags, gpus, gpu) => layouts(config_of(flags), gpus, gpu),
  estimate: (cfg, gpus, gpu, vocab) => plain(estimate(cfg, gpus, gpu, vocab)) };
