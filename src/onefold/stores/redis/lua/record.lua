-- What every script begins with. A record is one string, because that is the smallest thing that Redis can keep:
--
--   token (16)  form (1)  began (6)  end of the lease (6, only while running)  counts (1 or 12)  fingerprint  contents
--
-- Times are milliseconds of this server's clock. `../records.py` writes and reads the same form, and explains it.
local RUNNING, OPEN, HELD = 0, 1, 4
local WIDE = 16

local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function moment(milliseconds)
  return struct.pack('>I2I4', math.floor(milliseconds / 4294967296), milliseconds % 4294967296)
end

local function is_owned(record, token)
  return record and string.sub(record, 1, 16) == token
end

-- Attempt, revision, bypasses, and where the fingerprint begins.
local function counts(record)
  local form = string.byte(record, 17)
  local at = form % 8 == RUNNING and 30 or 24
  if bit.band(form, WIDE) ~= 0 then
    return struct.unpack('>I4I4I4', record, at)
  end
  local both = string.byte(record, at)
  return math.floor(both / 16), both % 16, 0, at + 1
end

-- The record for a reader, with the moment of reading and what is left of its TTL.
local function shown(record)
  return struct.pack('>dd', now(), redis.call('PTTL', KEYS[1])) .. record
end

-- An empty TTL is forever.
local function write(record, ttl)
  if ttl == '' then
    redis.call('SET', KEYS[1], record)
  else
    redis.call('SET', KEYS[1], record, 'PX', ttl)
  end
  return 1
end

-- Tell those who wait for the end of this record. Each of them has subscribed to its key as a channel, on this server.
-- Without permission for either command nobody is told: those who wait look by themselves.
local function wake()
  local subscribed = redis.pcall('PUBSUB', 'NUMSUB', KEYS[1])
  if (subscribed[2] or 0) > 0 then
    redis.pcall('PUBLISH', KEYS[1], '')
  end
end
