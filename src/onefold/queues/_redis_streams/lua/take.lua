-- Take entries, and count a delivery of each: those that have been idle for too long, whoever has them, or without such
-- a limit those that this consumer has and does not know of.
-- KEYS: stream. ARGV: group, consumer, how many, where to start, idle time or nothing, ids that it knows of.
-- Returns where to go on (nothing: that were all), a list of id, deliveries and fields, and the ids of entries that are
-- not in the stream any more.
local stream, group, consumer, limit, start, idle = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local known = {}
for at = 6, #ARGV do
  known[ARGV[at]] = true
end

local found, goes_on, gone = {}, '', {}
if idle ~= '' then
  local claimed = redis.call('XAUTOCLAIM', stream, group, consumer, idle, start, 'COUNT', limit, 'JUSTID')
  goes_on, found = claimed[1], claimed[2]
  -- Since Redis 7.
  gone = claimed[3] or {}
else
  local own = redis.call('XPENDING', stream, group, start, '+', limit, consumer)
  for at, pending in ipairs(own) do
    found[at] = pending[1]
  end
  if #own == tonumber(limit) then
    goes_on = '(' .. found[#found]
  end
end

local taken = {}
for _, id in ipairs(found) do
  if not known[id] then
    local entry = redis.call('XCLAIM', stream, group, consumer, 0, id)[1]
    if entry then
      local pending = redis.call('XPENDING', stream, group, id, id, 1)[1]
      taken[#taken + 1] = {id, pending[4], entry[2]}
    else
      redis.call('XACK', stream, group, id)
      gone[#gone + 1] = id
    end
  end
end
return {goes_on, taken, gone}
