"""The script by which Redis changes the counters of a tenant's limits, in one step for each change;
see `limiter`.

KEYS are the packed counters, the open reservations and their leases. ARGV are the operation
(reserve, count, extend, settle, lapse, rebuild, rebuilt), the reservation's id, its lease in ms,
most, least, used, seq, the packed scopes, the milliseconds for which the keys are kept without a
request, the largest and the least number of choices that the request runs, and the time at which a
rebuild began. Returns the tokens granted or the time at which a rebuild begins, the limit that
refuses, the tightest limits, and the number of choices that may run.
"""

from __future__ import annotations

from headwater.services.runtime.store import Script

CHANGE = Script(
    """
local SLOT, SLOTS, REMEMBER = 5000, 13, 600000
-- Longest time of a rebuild: more than a gateway needs to read records. What a slower one found may not be used.
local REBUILD = 10000
local op, id, lease, KEEP = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[9])
local most, least, used, seq = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local scopes = cmsgpack.unpack(ARGV[8])
local most_choices, least_choices, began = tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local slot = math.floor(now / SLOT)

-- Months since the year 0 of the proleptic calendar; years begin in March while it is computed.
local function month(at)
  local z = math.floor(at / 86400000) + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local m = mp < 10 and mp + 3 or mp - 9
  return (yoe + era * 400 + (m <= 2 and 1 or 0)) * 12 + m - 1
end
local function periods_at(at) return { day = math.floor(at / 86400000), month = month(at) } end
local periods = periods_at(now)

local counters = {}
local function counter(name)
  local c = counters[name]
  if not c then
    local raw = redis.call('HGET', KEYS[1], name)
    c = raw and cmsgpack.unpack(raw) or { running = 0, slots = {} }
    for s in pairs(c.slots) do
      if s <= slot - SLOTS then c.slots[s] = nil end
    end
    counters[name] = c
  end
  return c
end

-- What was spent before a period began does not count in it.
local function turn(c, kind)
  if c.spent and c.kind == kind and c.period < periods[kind] then
    c.period, c.spent, c.folded = periods[kind], 0, 0
  elseif c.kind ~= kind then
    c.spent, c.kind, c.period = nil, kind, periods[kind]
  end
end

local function in_window(c, column)
  local sum = 0
  for _, counts in pairs(c.slots) do sum = sum + counts[column] end
  return sum
end

-- Until enough of a full window has gone.
local function wait_for(c, column, excess)
  for s = slot - SLOTS + 1, slot do
    excess = excess - (c.slots[s] and c.slots[s][column] or 0)
    if excess <= 0 then return (s + SLOTS) * SLOT - now end
  end
  return -1
end

local function take(r, name, tokens, requests)
  local c = counter(name)
  local counts = c.slots[slot] or { 0, 0 }
  counts[1], counts[2] = counts[1] + requests, counts[2] + tokens
  c.slots[slot] = counts
  if c.spent then c.spent = c.spent + tokens end
  if c.kind then r.periods[name] = c.kind .. c.period end
end

-- Keeps what is spent while the records are read, which may lack it. A rebuild that ends uses what came behind its own
-- beginning: any number of gateways may count at the same time, and any of them may die.
local function note_late(c, seq, spent)
  local rebuild = c.rebuilding
  if rebuild and rebuild.latest < now - REBUILD then
    c.rebuilding = nil
  elseif rebuild then
    rebuild.late[#rebuild.late + 1] = { now, seq, spent }
  end
end

-- The end of a reservation: what it did not use goes back to where it was taken from, the youngest first.
local function settle(r, used, seq)
  for _, name in ipairs(r.scopes) do
    local c, unused = counter(name), r.tokens - used
    c.running = math.max(0, c.running - (r.choices or 1))
    if not c.spent then
      note_late(c, seq, used)
    elseif r.periods[name] == c.kind .. c.period then
      local counted = seq > 0 and seq <= c.folded
      c.spent = math.max(0, c.spent - (counted and r.tokens or unused))
    end
    for i = #r.taken, 1, -1 do
      local counts, part = c.slots[r.taken[i][1]], math.min(unused, r.taken[i][2])
      if counts then counts[2] = math.max(0, counts[2] - part) end
      unused = unused - part
    end
  end
end

local function forget(id)
  redis.call('HDEL', KEYS[2], id)
  redis.call('ZREM', KEYS[3], id)
end

local function keep(id, r, ms)
  redis.call('HSET', KEYS[2], id, cmsgpack.pack(r))
  redis.call('ZADD', KEYS[3], now + ms, id)
end

local function reservation(id)
  local raw = redis.call('HGET', KEYS[2], id)
  return raw and cmsgpack.unpack(raw)
end

-- Its gateway may yet live: then it goes on from here.
local function lapse(id, r, used, seq)
  settle(r, used, seq)
  r.used, r.tokens, r.taken, r.lapsed = used, used, {}, true
  keep(id, r, REMEMBER)
end

-- What was spent beyond what a reservation had reported when it lapsed, or was never reserved at all.
local function spend(names, more, seq)
  for _, name in ipairs(names) do
    local c = counter(name)
    if not c.spent then
      note_late(c, seq, more)
    elseif not (seq > 0 and seq <= c.folded) then
      c.spent = c.spent + more
    end
  end
end

for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, 64)) do
  local r = reservation(gone)
  if r and not (r.lapsed or r.settled) then
    lapse(gone, r, r.used, 0)
  else
    forget(gone)
  end
end

-- What comes behind its settlement changes nothing.
local own = reservation(id)
local is_over = own and own.settled

-- The first scope that stands in the way: { name, limit, ms until it does not }; else how many tokens there are, and
-- how many choices may run.
local function fit(most, least, choices)
  for _, scope in ipairs(scopes) do
    local c = counter(scope.name)
    if scope.budget then
      turn(c, scope.kind)
      if not c.spent then return nil, { scope.name, 'unknown', 0 } end
      most = math.min(most, scope.budget - c.spent)
      if most < least or (scope.budget == 0) then return nil, { scope.name, 'budget', -1 } end
    end
    if scope.tpm then
      if least > scope.tpm then return nil, { scope.name, 'tokens', -1 } end
      most = math.min(most, scope.tpm)
    end
    if choices > 0 and scope.running then
      if least_choices > scope.running then return nil, { scope.name, 'concurrency', -1 } end
      choices = math.min(choices, scope.running - c.running)
      if choices < least_choices then return nil, { scope.name, 'concurrency', 1000 } end
    end
  end
  for _, scope in ipairs(scopes) do
    if scope.tpm then
      local c = counter(scope.name)
      local excess = in_window(c, 2) + most - scope.tpm
      if excess > 0 then return nil, { scope.name, 'tokens', wait_for(c, 2, excess) } end
    end
  end
  return most, nil, choices
end

-- The first scope whose requests of the minute are used up: { name, limit, ms until they are not }.
local function used_up()
  for _, scope in ipairs(scopes) do
    local c = counter(scope.name)
    local excess = scope.rpm and in_window(c, 1) + 1 - scope.rpm
    if excess and excess > 0 then return { scope.name, 'requests', wait_for(c, 1, excess) } end
  end
end

-- The tightest limits of requests and tokens: { limit, left, ms until all of it is there again }, twice.
local function standing()
  local found = { {}, {} }
  for _, scope in ipairs(scopes) do
    for column, limit in pairs({ scope.rpm or false, scope.tpm or false }) do
      local c = counter(scope.name)
      local left = limit and math.max(0, limit - in_window(c, column))
      if limit and (not found[column][1] or left < found[column][2]) then
        found[column] = { limit, left, math.max(0, wait_for(c, column, in_window(c, column))) }
      end
    end
  end
  return found
end

-- A reservation that holds so many tokens, and the seats of so many choices, in every scope.
local function reserve(tokens, choices)
  local r = { tokens = tokens, used = used, choices = choices, taken = { { slot, tokens } }, scopes = {}, periods = {} }
  for i, scope in ipairs(scopes) do
    r.scopes[i] = scope.name
    take(r, scope.name, tokens, 0)
    counter(scope.name).running = counter(scope.name).running + choices
  end
  return r
end

local granted, refused, choices = 0, nil, 0
if op == 'reserve' then
  granted, refused, choices = fit(most, least, most_choices)
  if granted then keep(id, reserve(granted, choices), lease) end
elseif op == 'count' then
  refused = used_up()
  if not refused then
    for _, scope in ipairs(scopes) do take({ periods = {} }, scope.name, 0, 1) end
  end
elseif op == 'extend' and not is_over then
  local r = own
  if not r then
    -- Redis has lost it: it holds what its gateway says. `least` is that in this call.
    r = reserve(least, most_choices)
  elseif r.lapsed then
    local missing = math.max(0, least - r.tokens)
    for _, name in ipairs(r.scopes) do
      take(r, name, missing, 0)
      counter(name).running = counter(name).running + (r.choices or 1)
    end
    r.tokens, r.taken, r.lapsed = r.tokens + missing, { { slot, missing } }, nil
  end
  r.used = used
  if most > 0 then
    granted, refused = fit(most, 1, 0)
    if granted then
      for _, name in ipairs(r.scopes) do take(r, name, granted, 0) end
      r.tokens = r.tokens + granted
      r.taken[#r.taken + 1] = { slot, granted }
    end
  end
  keep(id, r, lease)
elseif op == 'settle' and not is_over then
  local r = own
  if r and not r.lapsed then
    settle(r, used, seq)
  else
    -- Granted without Redis, or lost by it: only what was spent is of interest now.
    local names = {}
    for i, scope in ipairs(scopes) do names[i] = scope.name end
    spend(names, used - (r and r.used or 0), seq)
  end
  keep(id, { settled = true }, lease)
elseif op == 'lapse' and own and not is_over then
  if own.lapsed then
    spend(own.scopes, used - own.used, seq)
    own.used, own.tokens = used, used
    keep(id, own, REMEMBER)
  else
    lapse(id, own, used, seq)
  end
elseif op == 'rebuild' then
  -- Begins to count anew what a scope has spent. Where that is known by now nothing is to be counted.
  granted = now
  for _, scope in ipairs(scopes) do
    local c = counter(scope.name)
    turn(c, scope.kind)
    if not c.spent then
      local others, late = c.rebuilding or { since = now, late = {} }, {}
      for _, each in ipairs(others.late) do
        if each[1] >= now - REBUILD then late[#late + 1] = each end
      end
      c.period = periods[scope.kind]
      c.rebuilding = { since = math.max(others.since, now - REBUILD), latest = now, late = late }
    end
  end
elseif op == 'rebuilt' then
  -- `used` was found in the records up to `seq`; what is open, and what was settled behind that, comes on top. The
  -- first rebuild that ends is used, unless what was settled since it began is not known, or its period is over.
  for _, scope in ipairs(scopes) do
    local c = counter(scope.name)
    local rebuild, is_now = c.rebuilding, periods_at(began)[scope.kind] == periods[scope.kind]
    if rebuild and rebuild.since <= began and is_now then
      turn(c, scope.kind)
      local spent = used
      for _, late in ipairs(rebuild.late) do
        if late[1] >= began and (late[2] == 0 or late[2] > seq) then spent = spent + late[3] end
      end
      local open = redis.call('HGETALL', KEYS[2])
      for i = 1, #open, 2 do
        local r = cmsgpack.unpack(open[i + 1])
        for _, name in ipairs(r.scopes or {}) do
          if name == scope.name and not r.lapsed then
            spent = spent + r.tokens
            r.periods[name] = c.kind .. c.period
            redis.call('HSET', KEYS[2], open[i], cmsgpack.pack(r))
          end
        end
      end
      c.spent, c.folded, c.rebuilding = spent, seq, nil
    end
  end
end

for name, c in pairs(counters) do
  c.at = now
  redis.call('HSET', KEYS[1], name, cmsgpack.pack(c))
end
-- Nothing outlives its use: a tenant's keys go by themselves, and so do scopes that nobody asks for any longer.
local old = redis.call('HRANDFIELD', KEYS[1])
if old and not counters[old] then
  local c = cmsgpack.unpack(redis.call('HGET', KEYS[1], old))
  if (c.at or 0) < now - KEEP and c.running <= 0 then redis.call('HDEL', KEYS[1], old) end
end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, KEEP) end
return cmsgpack.pack({ granted or 0, refused or false, standing(), choices or 0 })
"""
)
