// What the translated Python needs: its containers, operators and the few library functions that cost/ calls.
// The formulas are not here: bench/planner_page.py translates them.
"use strict";

class RefusedError extends Error {}
const ValueError = (text) => new RefusedError(text);
ValueError.is = (error) => error instanceof RefusedError;

// A key of a dict or set: tuples are compared by what they hold.
const $key = (k) => (Array.isArray(k) ? "\u0001" + JSON.stringify(k) : k);

class Dict {
  constructor(pairs = []) {
    this.map = new Map();
    for (const [k, v] of $it(pairs)) this.set(k, v);
  }
  set(k, v) { this.map.set($key(k), [k, v]); }
  has(k) { return this.map.has($key(k)); }
  missing(k) { throw new Error(`KeyError: ${k}`); }
  at(k) { return this.has(k) ? this.map.get($key(k))[1] : this.missing(k); }
  get(k, otherwise = null) { return this.has(k) ? this.at(k) : otherwise; }
  setdefault(k, v) { if (!this.has(k)) this.set(k, v); return this.at(k); }
  pop(k) { const v = this.at(k); this.map.delete($key(k)); return v; }
  update(other) { for (const [k, v] of $pairs(other)) this.set(k, v); }
  keys() { return [...this.map.values()].map(([k]) => k); }
  values() { return [...this.map.values()].map(([, v]) => v); }
  items() { return [...this.map.values()]; }
  union(...others) { return set([...this.keys(), ...others.flatMap((other) => [...$it(other)])]); }
  get length() { return this.map.size; }
  toJSON() { return this.items(); }
}

class Counting extends Dict {
  missing() { return 0; }
  update(other) { for (const [k, v] of $pairs(other)) this.set(k, $add(this.at(k), v)); }
}

class Slice {
  constructor(start, stop, step) { Object.assign(this, { start, stop, step }); }
}

const $it = (x) => (x instanceof Dict ? x.keys() : x);
const $pairs = (x) => (x instanceof Dict ? x.items() : x);
const $named = (x) => (x instanceof Dict ? Object.fromEntries(x.items()) : x);
const $is = (a, b) => (a ?? null) === (b ?? null);
const $eq = (a, b) => $key(a) === $key(b) || a == b && typeof a !== "string" && typeof b !== "string" && a !== null
  && b !== null && !Array.isArray(a) && !Array.isArray(b) && typeof a !== "object";

// Whether Python takes x as true.
function $t(x) {
  if (x === null || x === undefined) return false;
  if (Array.isArray(x) || x instanceof Dict) return x.length > 0;
  return Boolean(x);
}
const $or = (a, b) => ($t(a) ? a : b());
const $and = (a, b) => ($t(a) ? b() : a);

function $has(holder, x) {
  if (holder instanceof Dict) return holder.has(x);
  return [...holder].some((y) => $eq(x, y));
}

// Whole numbers have no limit in Python. Above 2^53 they become a BigInt here, and return when they are small.
const $whole = (x) => typeof x === "bigint" || Number.isSafeInteger(x) || typeof x === "boolean";
const $small = (x) => (x >= Number.MIN_SAFE_INTEGER && x <= Number.MAX_SAFE_INTEGER ? Number(x) : x);

function $number(a, b, plain, exact) {
  if (typeof a !== "bigint" && typeof b !== "bigint") {
    const x = plain(Number(a), Number(b));
    if (!Number.isInteger(x) || Number.isSafeInteger(x) || !$whole(a) || !$whole(b)) return x;
  }
  if ($whole(a) && $whole(b)) return $small(exact(BigInt(a), BigInt(b)));
  return plain(Number(a), Number(b));
}

function $add(a, b) {
  if (a instanceof Counting) {
    const sum = new Counting();
    for (const [k, v] of [...a.items(), ...b.items()]) sum.set(k, $add(sum.at(k), v));
    for (const k of sum.keys()) if (!(sum.at(k) > 0)) sum.pop(k);  // as Counter does
    return sum;
  }
  if (typeof a === "string") return a + b;
  if (Array.isArray(a)) return [...a, ...$it(b)];
  return $number(a, b, (x, y) => x + y, (x, y) => x + y);
}
function $mul(a, b) {
  if (Array.isArray(b)) [a, b] = [b, a];
  if (Array.isArray(a)) return Array.from({ length: b }, () => a).flat();
  if (typeof a === "string") return a.repeat(b);
  return $number(a, b, (x, y) => x * y, (x, y) => x * y);
}
const $sub = (a, b) => $number(a, b, (x, y) => x - y, (x, y) => x - y);
const $div = (a, b) => Number(a) / Number(b);
function $mod(a, b) {
  return $number(a, b, (x, y) => ((x % y) + y) % y, (x, y) => ((x % y) + y) % y);
}
const $floordiv = (a, b) => $number($sub(a, $mod(a, b)), b, (x, y) => x / y, (x, y) => x / y);
const $pow = (a, b) => $number(a, b, (x, y) => x ** y, (x, y) => x ** y);

function $item(holder, i) {
  if (holder instanceof Dict) return holder.at(i);
  if (holder instanceof ModuleDict) return holder[i];
  if (!(i instanceof Slice)) return i < 0 ? holder[holder.length + i] : holder[i];
  const all = Array.from(holder);
  const end = (x, otherwise) => (x === null ? otherwise : x < 0 ? Math.max(0, all.length + x) : x);
  const part = all.slice(end(i.start, 0), end(i.stop, all.length));
  return i.step === null ? part : part.filter((_, j) => j % i.step === 0);
}
function $setitem(holder, i, value) {
  if (holder instanceof Dict) holder.set(i, value);
  else holder[i < 0 ? holder.length + i : i] = value;
}
// A module's attributes are in the order in which they got a parameter or a module.
function $set(holder, name, value) {
  if (value instanceof Parameter || value instanceof Module) delete holder[name];
  holder[name] = value;
}

function $call(f, given, named) {
  if (f.$builtin) return f(...given, named);
  if (!f.$p) throw new Error(`${f.name} takes no named arguments here`);
  const all = [...given];
  const others = {};
  for (const [name, value] of Object.entries(named)) {
    const at = f.$p.indexOf(name);
    if (at >= 0) all[at] = value;
    else if (f.$kw) others[name] = value;
    else throw new Error(`${f.name} has no parameter ${name}`);
  }
  for (let i = 0; i < all.length; i++) if (!(i in all)) all[i] = undefined;
  if (f.$kw) all[f.$p.length] = new Dict(Object.entries(others));
  return f(...all);
}
function $method(holder, name, given, named) {
  const has_names = Object.keys(named).length > 0;
  if (Array.isArray(holder) && name in LIST) return LIST[name](holder, ...given, named);
  if (typeof holder === "string" && name in TEXT) return TEXT[name](holder, ...given);
  if (name === "bit_length") return holder.toString(2).length;  // of a whole number above 0
  if (typeof holder[name] !== "function") throw new Error(`no method ${name}`);
  return has_names ? $call(holder[name], given, named) : holder[name](...given);
}
const LIST = {
  append: (list, x) => list.push(x), extend: (list, x) => list.push(...$it(x)), popleft: (list) => list.shift(),
  sort: (list, named) => list.sort($order(named.key)), index: (list, x) => list.findIndex((y) => $eq(x, y)),
  _replace: (tuple, named) => tuple.replaced(named),
};
const TEXT = {
  split: (text, by) => text.split(by), startswith: (text, start) => text.startsWith(start),
  strip: (text) => text.trim(), endswith: (text, end) => text.endsWith(end),
  partition: (text, by) => [...text.split(by, 1), text.includes(by) ? by : "", text.split(by).slice(1).join(by)], isdecimal: (text) => /^[0-9]+$/.test(text),
  join: (text, parts) => [...$it(parts)].join(text),
};

function $cache(f) {
  const known = new Map();
  const cached = (...given) => {
    const key = JSON.stringify(given);
    if (!known.has(key)) {
      if (known.size > 2000) known.clear();
      known.set(key, f(...given));
    }
    return known.get(key);
  };
  cached.$p = f.$p;
  return cached;
}

function $namedtuple(fields, defaults, properties) {
  class Tuple extends Array {
    static get [Symbol.species]() { return Array; }
    replaced(named) { return $call(make, [...this], named); }
  }
  fields.forEach((name, i) => Object.defineProperty(Tuple.prototype, name, { get() { return this[i]; } }));
  for (const [name, f] of Object.entries(properties)) {
    Object.defineProperty(Tuple.prototype, name, { get() { return f(this); } });
  }
  const make = (...values) => {
    const tuple = new Tuple();
    fields.forEach((name, i) => tuple.push(values[i] === undefined ? defaults[name] : values[i]));
    return tuple;
  };
  make.$p = make._fields = fields;
  return make;
}

// -- the model: only the shapes of its parameters

class Parameter {
  constructor(shape) { this.shape = shape; this.ndim = shape.length; this.requires_grad = true; }
  requires_grad_(value) { this.requires_grad = value; }
  numel() { return this.shape.reduce((n, size) => $mul(n, size), 1); }
}
class Module {
  register_buffer() {}
  *named_parameters(prefix = "") {
    for (const [name, p] of Object.entries(this)) if (p instanceof Parameter) yield [prefix + name, p];
    for (const [name, m] of Object.entries(this)) {
      if (m instanceof Module) yield* m.named_parameters(`${prefix}${name}.`);
    }
  }
  parameters() { return [...this.named_parameters()].map(([, p]) => p); }
  *modules() {
    yield this;
    for (const m of Object.values(this)) if (m instanceof Module) yield* m.modules();
  }
}
class ModuleDict extends Module {}
function $module(start, names, has_others = false) {
  const make = (...given) => {
    const made = new Module();
    made.$kind = make;
    start(made, ...given);
    return made;
  };
  make.$p = names;
  make.$kw = has_others;
  return make;
}
const nn = { ModuleDict: () => new ModuleDict() };
const $dtype = (name, itemsize) => ({ name, itemsize });
const torch = {
  float64: $dtype("float64", 8), float32: $dtype("float32", 4), bfloat16: $dtype("bfloat16", 2),
  float16: $dtype("float16", 2), int64: $dtype("int64", 8),
  promote_types: (a, b) => (a.itemsize >= b.itemsize ? a : b),
  device: (type) => ({ type, index: null }), empty: (shape) => shape, nn: { Parameter: (shape) => new Parameter(shape) },
  zeros: () => null,
};
torch.zeros.$builtin = true;
const plain_dispatcher = () => null;
const peer_access = null;  // cost.step_time gives choose() a reach of its own

// What buckets depend on: all flags but those of the layout. cost/parameters.py keeps what it has built by this key.
const _flags_of_any_layout = (cfg) =>
  JSON.stringify(Object.entries(cfg).filter(([name]) => name !== "zero" && !LAYOUT.has(name)));

// -- one rank's mesh: the sizes of its axes and its place on each, instead of the tables of all ranks

// at(i) is the i-th rank of the axis; shard_sharing has the shard and the replicas of --shard, or is null.
function Axis(name, rank = 0, size = 1, at = () => 0, shard_sharing = null) {
  const axis = { name, rank, size, shard_sharing, get ranks() { return Array.from({ length: size }, (_, i) => at(i)); } };
  axis.sharing = (zero = 1) => {
    const [shard, replicas] = zero === 0 ? [Axis(name), axis] : shard_sharing ?? [axis, Axis(name)];
    return Object.assign([shard, replicas], { shard, replicas });
  };
  return axis;
}
Axis.$p = ["name", "rank", "size"];
function Mesh(...axes) {
  const mesh = Object.fromEntries(MESH_AXES.map((name, i) => [name, axes[i]]));
  mesh.axes = () => new Dict(axes.flatMap((axis) => [axis, ...(axis.shard_sharing ?? [])]).map((axis) => [axis.name, axis]));
  return mesh;
}
Mesh.__annotations__ = MESH_AXES;
function make_mesh(world, tp = 1, pp = 1, ep = 1, cp = 1, n_experts = 0, shard = 0) {
  const dp = $call(check_ranks, [world.size, tp, pp, ep, n_experts, cp], { shard });
  const stage = dp * cp * tp;
  const here = world.rank % stage;
  const at = Math.floor(world.rank / stage);
  const of_dp_and_cp = Math.floor(here / tp);
  const axes = {  // this rank's place, the size, and how far neighbours are apart
    world: [world.rank, world.size, 1], dp: [Math.floor(here / (tp * cp)), dp, tp * cp], cp: [of_dp_and_cp % cp, cp, tp],
    tp: [here % tp, tp, 1], pp: [at, pp, stage], ep: [here % ep, ep, 1], edp: [Math.floor(here / ep), stage / ep, ep],
    dpcp: [of_dp_and_cp, dp * cp, tp], stage: [here, stage, 1],
    tied: [of_dp_and_cp, at === 0 || at === pp - 1 ? dp * cp : 1, tp],
  };
  const made = {};
  for (const name of MESH_AXES) {
    const [rank, size, stride] = axes[name];
    const first = world.rank - rank * stride;
    const ranks_at = (start, step) => (i) => start + i * step;
    let shard_sharing = null;
    const sums = name === "stage" || name === "edp" || name === "tied" || name === (cp === 1 ? "dp" : "dpcp");
    if (shard > 0 && shard < dp * cp && sums) {
      const inside = Math.max(1, shard * tp / stride);
      const place = rank % inside;
      const block = Math.floor(rank / inside);
      shard_sharing = [Axis(`${name}.shard`, place, inside, ranks_at(first + block * inside * stride, stride)),
        Axis(`${name}.replicas`, block, size / inside, ranks_at(first + place * stride, inside * stride))];
    }
    made[name] = Axis(name, rank, size, ranks_at(first, stride), shard_sharing);
  }
  if (pp > 1 && (at === 0 || at === pp - 1)) made.tied = both_ends(made.tied, at, (pp - 1) * stage);
  else if (pp > 1) made.tied = Axis("tied");
  return Mesh(...MESH_AXES.map((name) => made[name]));
}
make_mesh.$p = ["world", "tp", "pp", "ep", "cp", "n_experts", "shard", "groups"];

// A tied embedding's axis has the ranks of the first stage, then those of the last, which are `apart` further on. With
// --shard, so has each shard; the replicas are of one stage.
function both_ends(axis, at, apart) {
  const { name, rank, size, ranks, shard_sharing } = axis;
  const of_both = (i) => ranks[i % size] + (at === 0 ? 0 : -apart) + (i < size ? 0 : apart);
  const parts = shard_sharing && [both_ends(shard_sharing[0], at, apart), shard_sharing[1]];
  return Axis(name, rank + (at ? size : 0), 2 * size, of_both, parts);
}

// -- the library

function $before(x, y) {
  if (!Array.isArray(x)) return x < y;
  const i = x.findIndex((_, at) => !$eq(x[at], y[at]));
  return i < 0 ? x.length < y.length : $before(x[i], y[i]);
}
const $order = (key) => (a, b) => {
  const [x, y] = key ? [key(a), key(b)] : [a, b];
  if ($before(x, y)) return -1;
  return $before(y, x) ? 1 : 0;
};
function $best(is_better) {
  const best = (...given) => {
    const last = given.at(-1);
    const named = last !== null && typeof last === "object" && Object.getPrototypeOf(last) === Object.prototype
      ? given.pop() : {};
    const all = given.length === 1 ? [...$it(given[0])] : given;
    if (!all.length) return named.default;
    const value = named.key ?? ((x) => x);
    return all.reduce((a, b) => (is_better(value(b), value(a)) ? b : a));
  };
  best.$builtin = true;
  return best;
}
const max = $best((x, y) => x > y);
const min = $best((x, y) => x < y);
const sum = (items) => { let total = 0; for (const x of $it(items)) total = $add(total, x); return total; };
const slice = (start, stop) => new Slice(start, stop, null);
const len = (x) => x.length;
const abs = (x) => Math.abs(x);
const any = (items) => [...$it(items)].some($t);
const all = (items) => [...$it(items)].every($t);
const list = (x = []) => [...$it(x)];
const tuple = list;
const set = (x = []) => new Dict([...$it(x)].map((k) => [k, true]));
const str = (x) => $format(x, "");
const int = (x) => Math.trunc(Number(x));
const isinstance = (x, kinds) => [kinds].flat().includes(x.$kind);
const getattr = (holder, name) => holder[name];
const enumerate = (items, first = 0) => [...$it(items)].map((x, i) => [i + first, x]);
const reversed = (items) => [...$it(items)].reverse();
const filter = (f, items) => [...$it(items)].filter((x) => $t(f === null ? x : f(x)));
const map = (f, items) => [...$it(items)].map((x) => f(x));
const sorted = (items, named = {}) => [...$it(items)].sort($order(named.key));
sorted.$builtin = true;
function range(...given) {
  const [first, end, step] = given.length === 1 ? [0, given[0], 1] : [given[0], given[1], given[2] ?? 1];
  return Array.from({ length: Math.max(0, Math.ceil((end - first) / step)) }, (_, i) => first + i * step);
}
function zip(...given) {
  const lists = given.filter((x) => Symbol.iterator in Object(x) || x instanceof Dict).map((x) => [...$it(x)]);
  return lists[0].slice(0, Math.min(...lists.map((x) => x.length))).map((_, i) => lists.map((x) => x[i]));
}
zip.$builtin = true;
function round(x) {
  const low = Math.floor(x);
  if (x - low !== 0.5) return Math.round(x);
  return low % 2 ? low + 1 : low;
}
const dict = (given = {}) => new Dict(Symbol.iterator in given ? given : Object.entries(given));
dict.$builtin = true;
dict.fromkeys = (keys, value = null) => new Dict([...$it(keys)].map((k) => [k, value]));
function Counter(items = []) {
  const counts = new Counting();
  for (const x of $it(items)) counts.set(x, counts.at(x) + 1);
  return counts;
}
const SimpleNamespace = (named) => named;
SimpleNamespace.$builtin = true;
const math = {
  ceil: Math.ceil, floor: Math.floor, sqrt: Math.sqrt,
  gcd: (a, b) => (b ? math.gcd(b, a % b) : a),
  prod: (items) => [...$it(items)].reduce((x, y) => $mul(x, y), 1),
};
const check_ramp = () => {};  // The page does not ask for --rampup-batch-size.
const collections = { deque: (items) => [...items] };
const itertools = {
  repeat: (x, times) => Array.from({ length: times }, () => x),
  chain: { from_iterable: (lists) => [...$it(lists)].flatMap((items) => [...$it(items)]) },
  pairwise: (items) => items.slice(1).map((x, i) => [items[i], x]),
  accumulate: (items) => { let total = 0; return items.map((x) => (total += x)); },
  product: (...lists) => lists.reduce((rows, items) => rows.flatMap((row) => [...$it(items)].map((x) => [...row, x])),
    [[]]),
};
const dataclasses = { replace: (holder, named) => ({ ...holder, ...named }) };
dataclasses.replace.$builtin = true;

// A number or text as an f-string prints it.
function $format(x, spec) {
  if (spec === "") return Array.isArray(x) ? `(${x.map(String).join(", ")})` : x === null ? "None" : String(x);
  const [, commas, digits, kind] = spec.match(/^(,?)(?:\.(\d+))?([fg]?)$/);
  if (kind === "g") return String(Number(Number(x).toPrecision(Number(digits ?? 6))));
  let text = kind === "f" ? $fixed(Number(x), Number(digits)) : String(x);
  if (commas) text = text.replace(/^-?\d+/, (whole) => whole.replace(/\B(?=(\d{3})+$)/g, ","));
  return text;
}
// Of two numbers that are equally near Python takes the even one, toFixed the larger one.
function $fixed(x, digits) {
  const exact = Math.abs(x).toFixed(digits + 60);
  const kept = exact.slice(0, -60).replace(/\.$/, "");
  if (/^50*$/.test(exact.slice(-60)) && Number(kept.at(-1)) % 2 === 0) return (x < 0 ? "-" : "") + kept;
  return x.toFixed(digits);
}
